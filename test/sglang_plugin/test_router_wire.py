# SPDX-License-Identifier: Apache-2.0
"""What the router believes about SGLang's wire formats, asked of SGLang."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import msgspec
import pytest
from sglang.srt.disaggregation import kv_events
from sglang.srt.entrypoints import request_headers
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, get_hash_str, hash_str_to_int64

from banyan.router import prompt
from banyan.router.blocks import SALT_TAG, block_ids, pack
from banyan.router.description import read_loads
from banyan.router.events import AllBlocksCleared, BlockRemoved, BlockStored, read_batch

TOKENS = list(range(100, 165))


@pytest.mark.parametrize("cache_salt", [None, "tenant"])
def test_block_ids_when_computed_then_those_of_sglangs_events(cache_salt):
    seed = None if cache_salt is None else hashlib.sha256(SALT_TAG + cache_salt.encode()).hexdigest()
    expected = [hash_str_to_int64(key) for key in get_hash_str(TOKENS[:64], seed, page_size=16)]
    assert list(block_ids(pack(TOKENS), 16, cache_salt)) == expected


def test_salted_ids_when_a_node_publishes_them_then_they_are_ours():
    key = RadixKey(pack(TOKENS[:64]), cache_salt="tenant")
    root = SimpleNamespace(key=None, parent=None, event_hash_value=None)
    node = SimpleNamespace(key=key, parent=root, event_hash_value=None)
    published = [hash_str_to_int64(value) for value in compute_node_event_hash_values(node, 16)]
    assert published == list(block_ids(pack(TOKENS), 16, "tenant"))


def test_events_when_sglang_encodes_them_then_the_router_reads_them():
    stored = kv_events.BlockStored(
        block_hashes=[-7, 8], parent_block_hash=3, token_ids=[1, 2], block_size=1, lora_id=None,
        medium=kv_events.StorageMedium.GPU,
    )  # fmt: skip
    events = [stored, kv_events.BlockRemoved([8], kv_events.StorageMedium.CPU), kv_events.AllBlocksCleared()]
    payload = msgspec.msgpack.encode(kv_events.KVEventBatch(ts=2.5, events=events, attn_dp_rank=1))
    batch = read_batch(payload)
    assert batch.events == [BlockStored([-7, 8], "GPU"), BlockRemoved([8], "CPU_PINNED"), AllBlocksCleared()]
    assert (batch.ts, batch.attn_dp_rank) == (2.5, 1)


def test_loads_when_sglang_gives_them_then_every_field_is_there():
    snapshot = LoadSnapshot(timestamp=9.0, num_running_reqs=2, max_total_num_tokens=100, num_used_tokens=40)
    answer = {"timestamp": "1970-01-01T00:00:10+00:00", "loads": [snapshot.to_dict({"core"})]}
    report = read_loads(answer, asked_s=500.0)[0]
    assert (report.taken_s, report.num_running, report.free_tokens) == (499.0, 2, 60)


def test_rank_header_when_sglang_reads_headers_then_it_pins_a_rank():
    asked = SimpleNamespace(routed_dp_rank=None)
    request_headers.apply_header_overrides(asked, {prompt.RANK_HEADER: "1"})
    assert asked.routed_dp_rank == 1
