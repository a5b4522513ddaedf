# SPDX-License-Identifier: Apache-2.0
"""Everything that belongs to a page goes wherever the page goes: from a peer, the arena, and the store after a restart.

The pools are SGLang's own classes with Banyan's memory, on a CPU; what is compared is SGLang's view of each buffer.
"""

import functools
import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.index_keys_pool import SharedDSAPool
from test.sglang_plugin.rank.test_linker import transfer
from test.unit.directory.rig import keys

from banyan import _native
from banyan.config import Config
from banyan.layout import namespace
from banyan.layout.namespace import FORMAT_VERSION
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools import drafts
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool, SharedMLAPool
from banyan.sglang_plugin.rank import identity

NUM_PAGES = 6
COMMON = {"layer_num": 3, "device": "cpu", "enable_memory_saver": False}
HEADS = {**COMMON, "size": NUM_PAGES * 4, "page_size": 4, "head_num": 2, "head_dim": 8, "enable_alt_stream": False}
LATENTS = {**COMMON, "size": NUM_PAGES * 64, "page_size": 64, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
INDEX = {**LATENTS, "kv_cache_dim": 32, "index_head_dim": 128, "index_buf_size": NUM_PAGES * 64}


def heads():
    return SharedMHAPool(**HEADS, v_head_dim=4, dtype=torch.bfloat16)


def latents():
    return SharedMLAPool(**LATENTS, dtype=torch.bfloat16)


def index_keys():
    return SharedDSAPool(**INDEX, dtype=torch.bfloat16)


def with_drafts(pool, kind, *sizes):
    """``pool``, and behind it drafts of these sizes, made where SGLang makes them."""
    common = {"size": pool.size, "page_size": pool.page_size, "device": "cpu", "enable_memory_saver": False}

    def make(worker, *, token_to_kv_pool_allocator):
        worker.pools = tuple(kind(**{**common, **own}, layer_num=1, dtype=torch.bfloat16) for own in sizes)

    worker = SimpleNamespace(draft_parallel_layout=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drafts.runtime, "is_sharing", lambda: True)
        patched.setattr(drafts.runtime, "is_on_gpu", lambda: False)
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        drafts.around_alloc_memory_pool(make, worker, token_to_kv_pool_allocator=allocator)
    pool.drafts = worker.pools
    return pool


SMALL_HEADS = {"head_num": 1, "head_dim": 4, "enable_alt_stream": False}
SMALL_LATENTS = {"kv_lora_rank": 16, "qk_rope_head_dim": 4}


def heads_and_draft():
    return with_drafts(heads(), SharedMHAPool, SMALL_HEADS)


def latents_and_drafts():
    return with_drafts(latents(), SharedMLAPool, SMALL_LATENTS, SMALL_LATENTS)


def index_keys_and_draft():
    return with_drafts(index_keys(), SharedMHAPool, SMALL_HEADS)


KINDS = [heads, latents, index_keys, heads_and_draft, latents_and_drafts, index_keys_and_draft]
make_rank = functools.partial(rig.make_rank, drafts_of=lambda pool: getattr(pool, "drafts", ()))


def memory(pool):
    """Everything that the pool and its drafts have."""
    return (pool, *getattr(pool, "drafts", ()))[-1].banyan_bytes


def filled(make):
    """A pool in which every byte is drawn."""

    def made():
        pool = make()
        torch.frombuffer(memory(pool), dtype=torch.uint8).random_(0, 256)
        return pool

    return made


def views(pool):
    """SGLang's buffers of a pool and its drafts: each with how many of its rows a page has."""
    behind = [view for draft in getattr(pool, "drafts", ()) for view in views(draft)]
    if isinstance(pool, MHATokenToKVPool):
        return [(buffer, pool.page_size) for buffer in (*pool.k_buffer, *pool.v_buffer)] + behind
    index = [(buffer, 1) for buffer in pool.index_key_cache.buffer] if isinstance(pool, DSATokenToKVPool) else []
    return [(buffer, pool.page_size) for buffer in pool.kv_buffer] + index + behind


def content(pool, slots):
    """Everything that SGLang has at the pages of ``slots``, as bytes, buffer by buffer."""
    pages = (slots[:: pool.page_size] // pool.page_size).tolist()
    return [
        [buffer[page * rows : (page + 1) * rows].contiguous().view(torch.uint8).numpy().tobytes() for page in pages]
        for buffer, rows in views(pool)
    ]


def fetch(linker, pool, pages, names):
    """SGLang admits a request for these pages and runs its forward; their slots."""
    assert linker.lookup("r", transfer(names, None)) == [len(names)]
    slots = pages.alloc(len(names) * pool.page_size)
    assert linker.load("r", transfer(names, slots))
    batch = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(batch)
    for layer in range(pool.layer_num):
        linker.layer_done_counter.wait_until(layer)
    assert linker.finish_layer_wise_loading(batch)
    return slots


def settle(linker, name, count):
    deadline_s = time.monotonic() + 20
    while getattr(linker.counters, name) < count:
        assert time.monotonic() < deadline_s, linker.state()
        linker.num_completed_offloads()
        time.sleep(0.001)


@pytest.mark.parametrize("make", KINDS)
def test_page_when_a_peer_has_it_then_every_extent_comes_bit_for_bit(monkeypatch, make):
    config, rank_table = Config(min_fetch_tokens=4, host_gb=0.0), _native.RankTable.create(4)
    (owner, pool, pages), (reader, own, own_pages) = (
        make_rank(monkeypatch, rank_table, rank, config, make_pool=filled(make)) for rank in (0, 1)
    )
    names = keys(1, 2, 3)
    slots = pages.alloc(3 * pool.page_size)
    owner.offload(transfer(names, slots))
    before = content(own, torch.arange(own.page_size))
    targets = fetch(reader, own, own_pages, names)
    assert content(own, targets) == content(pool, slots)
    assert content(own, torch.arange(own.page_size)) == before, "nothing else was written"


@pytest.mark.parametrize("make", KINDS)
def test_page_when_only_the_arena_has_it_then_every_extent_comes_bit_for_bit(monkeypatch, make):
    config, rank_table = Config(min_fetch_tokens=4, host_gb=0.01), _native.RankTable.create(4)
    (owner, pool, pages), (reader, own, own_pages) = (
        make_rank(monkeypatch, rank_table, rank, config, make_pool=filled(make)) for rank in (0, 1)
    )
    names = keys(1, 2)
    slots = pages.alloc(2 * pool.page_size)
    owner.offload(transfer(names, slots))
    settle(owner, "backed_up_pages", 2)
    written = content(pool, slots)
    # Freed and overwritten: the pool has it no more.
    pages.free(slots)
    pages.alloc(NUM_PAGES * pool.page_size)
    torch.frombuffer(memory(pool), dtype=torch.uint8).zero_()
    assert content(own, fetch(reader, own, own_pages, names)) == written


@pytest.mark.parametrize("make", KINDS)
def test_page_when_only_the_store_of_a_server_before_has_it_then_every_extent_comes_bit_for_bit(
    monkeypatch, make, tmp_path
):
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    config = Config(min_fetch_tokens=4, host_gb=0.01, store=(str(tmp_path),), store_gb=1.0, store_admit="first")
    names = keys(1, 2, 3)
    monkeypatch.setattr(rig.module.requests, "inserted_chain", lambda page_tokens: names)
    writer, pool, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config, make_pool=filled(make))
    slots = pages.alloc(3 * pool.page_size)
    writer.offload(transfer(names, slots))
    settle(writer, "archived_pages", 3)
    written = content(pool, slots)
    writer.close()
    reader, own, own_pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config, make_pool=filled(make))
    assert content(own, fetch(reader, own, own_pages, names)) == written
    reader.close()


def test_store_when_pages_had_another_format_then_it_is_empty_and_takes_new_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    config = Config(min_fetch_tokens=4, host_gb=0.01, store=(str(tmp_path),), store_gb=1.0, store_admit="first")
    names = keys(1, 2)
    monkeypatch.setattr(rig.module.requests, "inserted_chain", lambda page_tokens: names)
    for version, num_found in ((FORMAT_VERSION - 1, 0), (FORMAT_VERSION, 0), (FORMAT_VERSION, 2)):
        monkeypatch.setattr(namespace, "FORMAT_VERSION", version)
        rank, pool, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config, make_pool=filled(index_keys))
        assert rank.lookup("r", transfer(names, None)) == ([num_found] if num_found else [])
        if not num_found:
            rank.offload(transfer(names, pages.alloc(2 * pool.page_size)))
            settle(rank, "archived_pages", 2)
        rank.close()


def test_index_keys_when_the_pool_is_shared_then_they_are_where_and_as_upstream_has_them():
    ours, theirs = SharedDSAPool(**INDEX, dtype=torch.bfloat16), DSATokenToKVPool(**INDEX, dtype=torch.bfloat16)
    for mine, other in zip(views(ours), views(theirs), strict=True):
        assert (mine[0].shape, mine[0].stride(), mine[0].dtype) == (other[0].shape, other[0].stride(), other[0].dtype)
    assert ours.banyan_geometry.page.bytes_by_name == {"latents": 3 * 64 * 64, "index keys": 3 * 8448}
    # SGLang moves keys token by token, scales apart from them.
    for pool in (ours, theirs):
        for number, (buffer, _) in enumerate(views(pool)):
            torch.manual_seed(number)
            buffer.view(torch.uint8).random_(0, 256)
        pool.index_key_cache.move(torch.tensor([70, 71]), torch.tensor([130, 3]))
    for mine, other in zip(views(ours), views(theirs), strict=True):
        assert torch.equal(mine[0].view(torch.uint8), other[0].view(torch.uint8))


@pytest.mark.parametrize(
    "other", [{"index_kpool": 2, "page_size": 128, "size": 512}, {"skip_topk_layers": [False, True, False]}]
)
def test_index_keys_when_they_do_not_lie_beside_every_token_then_refused(other, capsys):
    with pytest.raises((SystemExit, runtime.Refused)):
        SharedDSAPool(**{**INDEX, **other}, dtype=torch.bfloat16)
    assert "--banyan-share off" in capsys.readouterr().err
