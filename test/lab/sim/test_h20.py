# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from banyan_lab.sim import h20
from banyan_lab.sim.hardware import node
from banyan_lab.sim.llms import llm


def test_site_when_made_then_the_report_s_node():
    here = h20.site(block_tokens=256)
    assert here.num_ranks == 8 and here.copy_bytes_per_s == node("h20").compute_nic_bytes_per_s
    # 7,000 tokens/s of prompts of the median length, by the report.
    seconds = here.prefill.linear_s(20_000) + here.prefill.attention_s(new_tokens=20_000, cached_tokens=0)
    assert 20_000 / seconds == pytest.approx(7_000)
    assert here.prefill.flops_per_s < node("h20").gpu.bf16_flops_per_s


def test_token_when_weighed_then_as_published():
    """25.8 GiB for 281,888 tokens."""
    assert llm(h20.MODEL).kv_bytes_per_token * h20.POOL_TOKENS / 2**30 == pytest.approx(25.8, abs=0.05)
    assert h20.pool_figure().lands is False and h20.pool_figure().note


def test_streams_when_so_many_sessions_run_then_every_turn_ends_and_more_wait_longer():
    shape = replace(h20.LEGACY, num_requests=60, num_sessions=40)
    trace = shape.trace()
    here = h20.site(block_tokens=trace.block_tokens)
    one, many = (h20.in_turn(trace, here, h20.POLICY, num_streams=number) for number in (1, 24))
    assert many.mean_ttft_s > one.mean_ttft_s and many.p90_tpot_s >= one.p90_tpot_s


def test_figures_when_listed_then_each_published_one_says_what_it_hinges_on():
    rows = list(h20.figures())
    assert len(rows) == 13
    assert [row.name for row in rows if row.published is not None and not row.note] == []
