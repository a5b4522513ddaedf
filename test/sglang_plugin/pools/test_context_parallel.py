# SPDX-License-Identifier: Apache-2.0
"""Shards of a context-parallel group compute other tokens each, and SGLang puts their KV together before it writes any:
on this it stands that a page of one shard is whole. SGLang's own strategies, with all shards in one process."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.cp import interleave, zigzag
from sglang.srt.runtime_context import get_parallel

SIZE = 2


class Group:
    """Gives every shard what all of them have sent; their turns come one after the other, so it knows beforehand."""

    def __init__(self):
        self.sent = {}

    def all_gather_into_tensor(self, gathered, own):
        rows = gathered.shape[0] // SIZE
        for rank, shard in self.sent.items():
            gathered[rank * rows : rank * rows + len(shard)] = shard


@pytest.fixture
def group(monkeypatch):
    made = Group()
    monkeypatch.setattr(interleave, "attn_cp_all_gather_into_tensor", made.all_gather_into_tensor)
    monkeypatch.setattr(interleave, "use_symmetric_memory", lambda *_, **__: nullcontext())
    monkeypatch.setattr(interleave, "is_allocation_symmetric", lambda: False)
    return made


@pytest.mark.parametrize("strategy", [interleave.InterleaveCPStrategy, zigzag.ZigzagCPStrategy])
@pytest.mark.parametrize("num_tokens", [8, 11, 16])
def test_kv_when_it_was_computed_by_shards_of_a_context_then_each_shard_has_all_of_it_in_order(
    strategy, num_tokens, group
):
    rows = torch.arange(num_tokens * 3, dtype=torch.float32).reshape(num_tokens, 3)

    def as_shard(rank):
        return get_parallel().override(attn_cp_rank=rank, attn_cp_size=SIZE, attn_cp_group=group)

    batches = {}
    for rank in range(SIZE):
        with as_shard(rank):
            cp = strategy(SIZE)
            batches[rank] = SimpleNamespace(attn_cp_metadata=cp.build_metadata(num_tokens, [num_tokens], [num_tokens]))
            group.sent[rank] = cp.shard_hidden_states(rows, batches[rank])
    assert not any(len(shard) >= num_tokens for shard in group.sent.values()), "nothing was divided"
    for rank, own in group.sent.items():
        with as_shard(rank):
            assert torch.equal(strategy(SIZE).gather_kv_cache(own, batches[rank]), rows)
