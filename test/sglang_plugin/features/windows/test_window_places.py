# SPDX-License-Identifier: Apache-2.0
"""The linker of a model with sliding windows as SGLang drives it: two ranks in one process, two pools each."""

import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator import swa
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.cache_action import SWARebuild
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, POOL, SERVER, be_started, page, parameters_of
from test.unit.directory.rig import keys

from banyan import _native
from banyan.config import Config
from banyan.core import Run, SourceKind
from banyan.pacing.write_pause import WritePause
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool
from banyan.sglang_plugin.rank import hooks, identity
from banyan.sglang_plugin.rank import linker as module
from banyan.sglang_plugin.rank.linker import BanyanLinker
from banyan.sglang_plugin.rank.window_kind import capped

FILL = "sglang.srt.mem_cache.unified_cache.components.swa.SWAComponent.apply_component_action"
NUM_SLOTS, TOKENS, WINDOW_TOKENS = 8, 64, 6
"""Two pages of window."""
WINDOWED, FULL = [0, 2, 3], [1]


def make_pools():
    kwargs = {name: value for name, value in POOL.items() if name not in ("size", "layer_num")}
    pool = SWAKVPool(
        size=TOKENS,
        size_swa=TOKENS // 2,
        swa_attention_layer_ids=WINDOWED,
        full_attention_layer_ids=FULL,
        token_to_kv_pool_class=SharedMHAPool,
        **kwargs,
    )
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
    return pool


def parameters(monkeypatch, *, make_drafts=lambda pool: ()):
    monkeypatch.setattr(swa, "current_platform", SimpleNamespace(get_paged_allocator_cls=lambda: QuarantiningAllocator))
    pool = make_pools()
    allocator = swa.SWATokenToKVPoolAllocator(
        TOKENS, TOKENS // 2, PAGE, torch.bfloat16, "cpu", kvcache=pool, need_sort=False
    )
    return parameters_of(allocator, PAGE, drafts=make_drafts(pool), swa_retain_window=WINDOW_TOKENS)


class WindowRank:
    def __init__(self, monkeypatch, rank_table, rank, config, **more):
        be_started(monkeypatch, rank_table, rank, config)
        params = parameters(monkeypatch, **more)
        self.allocator = params.token_to_kv_pool_allocator
        self.pool = self.allocator.get_kvcache()
        components = {ComponentType.FULL, ComponentType.SWA}
        self.linker = BanyanLinker(SERVER, params, components=components, extra_config={})

    def alloc(self, num_pages, num_windowed):
        """Slots in both pools, of the last pages in the windows'."""
        full = self.allocator.full_attn_allocator.alloc(num_pages * PAGE)
        return full, self.allocator.swa_attn_allocator.alloc(num_windowed * PAGE)

    def offload(self, names, num_windowed=None):
        """A node of SGLang's tree with the window pages of its end; where they lie."""
        num_windowed = len(names) if num_windowed is None else num_windowed
        full, window = self.alloc(len(names), num_windowed)
        transfers = [transfer(names, full)]
        if num_windowed:
            transfers.append(transfer(names[-num_windowed:], window))
        assert self.linker.offload(transfers) and self.linker.num_completed_offloads() == 1
        assert self.linker.pop_completed_offload()
        return full, window

    def lookup(self, names, rid="r"):
        return self.linker.lookup(rid, [transfer(names, None), transfer(names[-2:], None)])

    def load(self, names, rid="r"):
        """Where the pages went, or None."""
        num_windowed = min(2, len(names))
        full, window = self.alloc(len(names), num_windowed)
        if not self.linker.load(rid, [transfer(names, full), transfer(names[-num_windowed:], window)]):
            return None
        return full, window

    def land(self):
        index = self.linker.start_layer_wise_loading()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(len(WINDOWED) + len(FULL)):
            counter.wait_until(layer)
        return self.linker.finish_layer_wise_loading(index)

    def full_pages(self, slots):
        return page(self.pool.full_kv_pool, slots)

    def window_pages(self, slots):
        return page(self.pool.swa_kv_pool, slots)

    def until(self, condition):
        """Scheduling steps, until something has come of them."""
        deadline_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline_s
            self.linker.num_completed_offloads()
            time.sleep(0.001)


def transfer(names, slots):
    return SimpleNamespace(keys=names, device_indices=slots)


@pytest.fixture(params=[0.0, 0.001, None], ids=["pools", "pools and arena", "arena sized at the start"])
def ranks(monkeypatch, request):
    config = Config(min_fetch_tokens=PAGE, host_gb=request.param)
    rank_table = _native.RankTable.create(NUM_SLOTS)
    return [WindowRank(monkeypatch, rank_table, rank, config) for rank in (0, 1)]


def test_linker_when_a_model_has_windows_then_sglang_is_told_that_it_keeps_both_pools(ranks):
    assert set(ranks[0].linker.pools) == {PoolName.KV, PoolName.SWA}


def test_prefix_when_one_rank_offloads_it_then_the_other_loads_full_and_window_pages(ranks):
    owner, reader = ranks
    names = keys(1, 2, 3)
    full, window = owner.offload(names)
    assert reader.lookup(names) == [3]
    own_full, own_window = reader.load(names)
    assert reader.land()
    assert torch.equal(reader.full_pages(own_full), owner.full_pages(full))
    assert torch.equal(reader.window_pages(own_window), owner.window_pages(window[PAGE:]))


def test_prefix_when_sglang_has_freed_windows_then_the_longest_that_has_its_window_is_offered(ranks):
    owner, reader = ranks
    owner.offload(keys(1, 2))
    owner.offload(keys(3, 4), num_windowed=0)
    assert reader.lookup(keys(1, 2, 3, 4)) == [2]
    owner.offload(keys(5, 6))
    assert reader.lookup(keys(1, 2, 3, 4, 5, 6), "s") == [6]


def test_window_when_a_tombstone_has_been_filled_then_the_node_is_offered_again_with_it(ranks, monkeypatch):
    owner, reader = ranks
    names = keys(1, 2)
    full, _ = owner.offload(names, num_windowed=0)
    assert reader.lookup(names) == []
    window = owner.allocator.swa_attn_allocator.alloc(2 * PAGE)
    owner.allocator.set_full_to_swa_mapping(full, window)
    nodes = {7: names, 8: []}
    tree = SimpleNamespace(
        build_external_linker_offload_transfers=lambda node: ["not offered yet"] if node == 9 else None,
        get_hash_values=lambda node: nodes[node],
    )
    cache = SimpleNamespace(tree_core=tree, page_size=PAGE, token_to_kv_pool_allocator=owner.allocator)
    monkeypatch.setattr(hooks.linker, "installed", lambda: owner.linker)
    monkeypatch.setattr(hooks.runtime, "is_sharing", lambda: True)
    fill = hooked(FILL, lambda component, action: None)
    for node in (8, 9):  # Without names, and one that SGLang is going to offer.
        fill(SimpleNamespace(cache=cache), SWARebuild(node, full))
        assert reader.lookup(names, f"r{node}") == []
    fill(SimpleNamespace(cache=cache), SWARebuild(7, full))
    assert reader.lookup(names, "s") == [2]
    _, own_window = reader.load(names, "s")
    assert reader.land()
    assert torch.equal(reader.window_pages(own_window), owner.window_pages(window))


def test_window_when_its_pages_are_freed_under_a_reader_then_they_are_not_handed_out(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    _, window = owner.offload(names)
    reader.lookup(names)
    assert reader.load(names) is not None
    pages = owner.allocator.swa_attn_allocator
    pages.free(window)
    rest = pages.alloc(TOKENS // 2 - 2 * PAGE)
    assert not set(rest.tolist()) & set(window.tolist())
    assert reader.land()
    assert pages.alloc(2 * PAGE) is not None


def test_load_when_a_window_page_is_gone_then_sglang_computes_and_nothing_is_held(monkeypatch):
    config = Config(min_fetch_tokens=PAGE, host_gb=0.0)
    rank_table = _native.RankTable.create(NUM_SLOTS)
    owner, reader = (WindowRank(monkeypatch, rank_table, rank, config) for rank in (0, 1))
    names = keys(1, 2)
    full, window = owner.offload(names)
    assert reader.lookup(names) == [2]
    owner.allocator.swa_attn_allocator.free(window)
    assert reader.load(names) is None
    owner.allocator.full_attn_allocator.free(full)
    assert owner.allocator.full_attn_allocator._num_held == 0


def test_weights_when_updated_then_window_pages_of_before_are_not_found(ranks):
    owner, reader = ranks
    owner.offload(keys(1, 2))
    for rank in (owner, reader):
        rank.linker.weights_changed()
    assert reader.lookup(keys(1, 2)) == []


def test_arena_when_the_pool_has_given_pages_up_then_both_kinds_come_from_it(monkeypatch):
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001)
    rank_table = _native.RankTable.create(NUM_SLOTS)
    owner, reader = (WindowRank(monkeypatch, rank_table, rank, config) for rank in (0, 1))
    names = keys(1, 2, 3)
    full, window = owner.offload(names)
    held = owner.full_pages(full).clone(), owner.window_pages(window[PAGE:]).clone()
    tiers = (owner.linker.kinds.full.tier, owner.linker.kinds.beside[0].tier)
    owner.until(lambda: all(tier.state()["num_arena_pages"] == 3 for tier in tiers))
    owner.allocator.full_attn_allocator.free(full)
    owner.allocator.swa_attn_allocator.free(window)
    assert reader.lookup(names) == [3]
    own_full, own_window = reader.load(names)
    assert reader.land()
    assert torch.equal(reader.full_pages(own_full), held[0])
    assert torch.equal(reader.window_pages(own_window), held[1])


def test_store_when_a_server_has_ended_then_the_next_one_has_its_full_and_window_pages(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "refuse", lambda *lines: pytest.fail(str(lines)))
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    config = Config(
        min_fetch_tokens=PAGE, host_gb=0.002, store=(str(tmp_path / "s"),), store_gb=0.1, store_admit="first"
    )
    names = keys(1, 2, 3)
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: names)
    monkeypatch.setattr(module.requests, "is_of_this_server", lambda request: False)
    first = WindowRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, config)
    first.linker.arrive("learnt")
    full, window = first.offload(names)
    held = first.full_pages(full).clone(), first.window_pages(window[PAGE:]).clone()
    first.until(lambda: first.linker.counters.archived_pages == 6)
    first.linker.close()

    second = WindowRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, config)
    second.linker.arrive("r")
    assert second.lookup(names) == [3]
    own_full, own_window = second.load(names)
    assert second.land()
    assert torch.equal(second.full_pages(own_full), held[0])
    assert torch.equal(second.window_pages(own_window), held[1])
    second.linker.close()


def test_writes_when_there_are_two_stores_then_both_stop_and_go():
    told = []

    class Told:
        def __init__(self, name):
            self.pause_writes = lambda: told.append((name, "pause"))
            self.open_writes = lambda: told.append((name, "open"))

    writes = WritePause(Told("full"), Told("window"))
    writes.begin_prefill()
    writes.end()
    assert told == [(name, word) for word in ("pause", "open") for name in ("full", "window")]


@pytest.mark.parametrize("most, read", [(3, 3), (10, 8), (0, 0), (-2, 0)])
def test_reads_when_only_so_much_can_be_restored_then_no_more_is_worth_reading(most, read):
    assert capped(lambda num_missing, found: min(found.num_pages, 8), most)(20, Run(SourceKind.STORE, 9)) == read


def test_state_when_a_model_has_windows_then_it_tells_of_them(ranks):
    state = ranks[0].linker.state()
    assert state["windows"]["num_window_pages"] == 2 and state["windows"]["num_pool_pages"] == TOKENS // 2 // PAGE


def test_linker_when_the_two_pools_are_of_a_kind_that_is_not_known_then_the_way_out_is_named(monkeypatch, capsys):
    monkeypatch.setattr(SWAKVPool, "layer_num", property(lambda pool: 9, lambda pool, number: None), raising=False)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.0)
    with pytest.raises(SystemExit):
        WindowRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, config)
    assert "--disable-hybrid-swa-memory" in capsys.readouterr().err
