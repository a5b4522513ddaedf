# SPDX-License-Identifier: Apache-2.0
import random
from dataclasses import replace

import pytest

from banyan_lab.sim import lengths
from banyan_lab.sim.offline import run_offline
from banyan_lab.sim.systems import SYSTEMS, deployment
from banyan_lab.sim.workload import agent_set

BASE = agent_set("agents-64k")
SITE = deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1)


def test_lengthened_set_when_appends_grow_then_fewer_turns_fill_the_same_contexts():
    grown = BASE.lengthened(append=4.0)
    per_turn = grown.mean_append_tokens + grown.mean_output_tokens
    assert grown.mean_append_tokens == 4 * BASE.mean_append_tokens
    assert (grown.max_tokens, grown.mean_total_tokens) == (BASE.max_tokens, BASE.mean_total_tokens)
    assert per_turn * grown.mean_turns == pytest.approx(
        (BASE.mean_append_tokens + BASE.mean_output_tokens) * BASE.mean_turns
    )
    assert grown.turns_sigma == pytest.approx(BASE.turns_sigma)


def test_lengthened_set_when_drawn_then_its_answers_are_as_long_as_asked():
    drawn = list(BASE.lengthened(output=2.0).trajectories(300, random.Random(0)))
    means = [sum(trajectory.outputs) / trajectory.num_turns for trajectory in drawn]
    assert sum(means) / len(means) == pytest.approx(2 * BASE.mean_output_tokens, rel=0.1)


def fake_outcome(job_s):
    real = run_offline(SYSTEMS["dualpath"], SITE, agent_set("agents-32k"), num_agents=1)
    return replace(real, job_s=job_s)


def test_lengths_when_listed_then_the_published_range_is_of_the_short_ones_only():
    """Basic's time is 100 s and 2 s more for each token of an answer; so the speed-ups are known."""
    rows = {
        row.name: row
        for row in lengths.figures(
            lambda system, workload: fake_outcome(
                100.0 + 2 * workload.mean_output_tokens if system == "basic" else 100.0
            )
        )
    }
    short = [row for name, row in rows.items() if "short appends" in name]
    assert [row.published for row in short] == [1.82, 1.99]
    assert short[0].simulated == pytest.approx(1 + 2 * 0.5 * BASE.mean_output_tokens / 100)
    assert short[1].simulated == pytest.approx(1 + 2 * BASE.mean_output_tokens / 100)
    longest = rows["660B 2P4D 64K, answer x8: speed-up of DualPath over Basic"]
    assert longest.published == 1.0 and longest.lands is False
