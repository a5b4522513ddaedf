# SPDX-License-Identifier: Apache-2.0
"""What the router believes about SGLang's wire formats, asked of SGLang."""

from __future__ import annotations

import asyncio
import inspect
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq.asyncio
from sglang.srt.disaggregation import kv_events
from sglang.srt.entrypoints import request_headers
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, get_storage_hash_str, hash_str_to_int64

from banyan.router import app, prompt
from banyan.router.blocks import BITS, block_ids, pack, salt_digests
from banyan.router.description import Source, read_loads
from banyan.router.events import AllBlocksCleared, BlockRemoved, BlockStored, EventFeed, read_batch
from banyan.router.subscription import subscribe
from benchmark.servers import free_port

TOKENS = list(range(100, 165))


def test_connections_when_they_idle_then_the_router_drops_them_before_sglang_does():
    assert envs.SGLANG_TIMEOUT_KEEP_ALIVE.get() > app.IDLE_S


@pytest.mark.parametrize("cache_salt", [None, "", "tenant", "\u00e9"])
def test_block_ids_when_a_node_publishes_pages_and_the_arena_names_them_by_their_keys_then_both_are_ours(cache_salt):
    key = RadixKey(pack(TOKENS[:64]), cache_salt=cache_salt)
    root = SimpleNamespace(key=None, parent=None, hash_value=None, event_hash_value=None)
    node = SimpleNamespace(key=key, parent=root, hash_value=None, event_hash_value=None)
    named = [compute_node_event_hash_values(node, 16), get_storage_hash_str(key, page_size=16)]
    expected = [[hash_str_to_int64(value) for value in values] for values in named]
    ours = [list(block_ids(pack(TOKENS), 16, digest)) for digest in salt_digests(cache_salt)]
    assert [ours[0], ours[-1]] == expected and len(ours) == (2 if cache_salt else 1)


def test_events_when_sglang_encodes_them_then_the_router_reads_them():
    stored = kv_events.BlockStored(
        block_hashes=[-7, 8], parent_block_hash=3, token_ids=[1, 2], block_size=1, lora_id=None,
        medium=kv_events.StorageMedium.GPU,
    )  # fmt: skip
    events = [stored, kv_events.BlockRemoved([8], kv_events.StorageMedium.CPU), kv_events.AllBlocksCleared()]
    assert {medium.value for medium in kv_events.StorageMedium} == {*BITS, "EXTERNAL"}
    payload = msgspec.msgpack.encode(kv_events.KVEventBatch(ts=2.5, events=events, attn_dp_rank=1))
    batch = read_batch(payload)
    assert batch.events == [BlockStored([-7, 8], "GPU"), BlockRemoved([8], "CPU_PINNED"), AllBlocksCleared()]
    assert (batch.ts, batch.attn_dp_rank) == (2.5, 1)


def test_loads_when_sglang_gives_them_then_every_field_is_there():
    snapshot = LoadSnapshot(timestamp=9.0, num_running_reqs=2, max_total_num_tokens=100, num_used_tokens=40)
    answer = {"timestamp": "1970-01-01T00:00:10+00:00", "loads": [snapshot.to_dict({"core"})]}
    report = read_loads(answer, asked_s=500.0)[0][0]
    assert (report.taken_s, report.num_running, report.capacity_tokens) == (499.0, 2, 100)


@pytest.mark.parametrize("request_type", [GenerateReqInput, CompletionRequest, ChatCompletionRequest])
def test_pin_when_sglang_reads_a_request_then_it_is_a_field_of_it(request_type):
    names = getattr(request_type, "model_fields", None) or request_type.__dataclass_fields__
    assert prompt.RANK_FIELDS[0] in names


def test_pin_headers_when_sglang_reads_headers_then_they_are_those():
    assert request_headers._HEADER_OVERRIDES[prompt.RANK_HEADERS[1]][0] == prompt.RANK_FIELDS[0]
    assert prompt.RANK_HEADERS[0] in inspect.getsource(OpenAIServingBase.extract_routed_dp_rank_from_header)


def test_publisher_when_followed_then_what_was_before_and_what_comes_is_known():
    ports = [free_port(), free_port()]
    publisher = kv_events.ZmqEventPublisher(
        0, f"tcp://127.0.0.1:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[1]}", bind=True
    )

    def publish(*ids):
        event = kv_events.BlockStored(list(ids), None, [], 16, None)
        publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=[event]))

    async def scenario():
        context, feed, applied = zmq.asyncio.Context(), EventFeed(), asyncio.Event()
        source = Source(0, f"tcp://127.0.0.1:{ports[0]}", "", f"tcp://127.0.0.1:{ports[1]}")
        following = asyncio.create_task(subscribe(context, source, feed, applied.set))
        try:
            async with asyncio.timeout(20):
                while 1 not in feed.blocks:
                    await asyncio.sleep(0.01)
                publish(2)
                await applied.wait()
            assert 2 in feed.blocks and feed.num_holes == 0
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            context.destroy(linger=0)

    try:
        publish(1)
        while not publisher._buffer:
            time.sleep(0.01)
        asyncio.run(scenario())
    finally:
        publisher.shutdown()
