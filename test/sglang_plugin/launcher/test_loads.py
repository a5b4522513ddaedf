# SPDX-License-Identifier: Apache-2.0
"""``/v1/loads`` of a server that shares: SGLang's answer, and what each rank waits for from the store."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints import v1_loads
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

from banyan._native import RankTable
from banyan.layout import Layout
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import loads

LAYOUT = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=2)


@pytest.fixture
def manager():
    """SGLang's, with two ranks' snapshots and no rank."""
    snapshots = [LoadSnapshot(dp_rank=rank, num_running_reqs=rank) for rank in range(2)]
    return SimpleNamespace(
        auto_create_handle_loop=lambda: None,
        elastic_worker_count=2,
        load_snapshot_reader=SimpleNamespace(read=snapshots.__getitem__, read_all=lambda: snapshots),
        server_args=None,
    )


def get_loads(manager, **asked):
    async def answer(**asked):
        return await loads.around_get_loads(TokenizerControlMixin.get_loads, manager, **asked)

    served = SimpleNamespace(get_loads=answer)
    return asyncio.run(v1_loads.get_loads(tokenizer_manager=served, **asked))


@pytest.mark.parametrize("include", [None, "core", "core,queues"])
def test_loads_when_ranks_wait_for_reads_then_each_says_how_much(include, manager, monkeypatch):
    rank_table = RankTable.create(4)
    rank_table.agree_on_page_tokens(16)
    # A rank has two shards, of which the first one tells.
    for member_slot, num_pages in enumerate((3, 3, 0, 0)):
        rank_table.set_reading(member_slot, num_pages)
    rank_table.set_read_rate(2, 50)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "bookkeeping", lambda args: {"rank_table": rank_table.path, "layout": LAYOUT})
    monkeypatch.setattr(v1_loads, "_num_accelerators_per_dp_rank", lambda: 1)
    told = get_loads(manager, include=include)["loads"]
    assert [(load["dp_rank"], load["num_running_reqs"], load["read_queue_tokens"]) for load in told] == [
        (0, 0, 48),
        (1, 1, 0),
    ]
    assert [load["read_tokens_per_s"] for load in told] == [0, 800]
    text = get_loads(manager, format="prometheus").body.decode()
    assert 'sglang_read_queue_tokens{dp_rank="0"} 48' in text


def test_loads_when_nothing_is_shared_then_sglangs_answer(manager, monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    monkeypatch.setattr(v1_loads, "_num_accelerators_per_dp_rank", lambda: 1)
    assert "read_queue_tokens" not in get_loads(manager)["loads"][0]
