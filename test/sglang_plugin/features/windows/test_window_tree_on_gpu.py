# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tree over two pools on a GPU, with the fake driver: what it holds while pages are on their way to the
peers, and what Banyan relies on where it holds nothing."""

from array import array
from collections import deque
from functools import partial

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from test.sglang_plugin.features.windows.window_gpu import (
    PAGE,
    PLAIN,
    TOKENS,
    WINDOW_TOKENS,
    let_the_device_run,
    make_node,
)
from test.sglang_plugin.rank.hooked import hooked

from banyan.sglang_plugin.pools.device_offloads import DeviceOffloads
from banyan.sglang_plugin.rank import hooks

FILL = "sglang.srt.mem_cache.unified_cache.components.swa.SWAComponent.apply_component_action"
NUM_PAGES = 2
PROMPT = list(range(100, 100 + NUM_PAGES * PAGE))
LONGER = PROMPT + list(range(200, 200 + NUM_PAGES * PAGE))
NAMES = get_storage_hash_str(RadixKey(array("q", PROMPT)), None, PAGE)
EVERYTHING = EvictParams(num_tokens=TOKENS, swa_num_tokens=TOKENS)


class Tree:
    """A rank's, and what a prefill leaves in it."""

    def __init__(self, monkeypatch, rank):
        self.rank = rank
        # Each rank is a process of its own, with one linker.
        self._be_the_process = partial(monkeypatch.setattr, hooks.linker, "installed", lambda: rank.linker)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=rank.allocator,
            page_size=PAGE,
            sliding_window_size=WINDOW_TOKENS,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_cache_linker(rank.linker)

    def insert(self, tokens=PROMPT):
        """A forward has been launched that computes a prompt, and it enters the tree; where its pages lie."""
        self._be_the_process()
        full, window = self.rank.alloc(len(tokens) // PAGE, len(tokens) // PAGE)
        for part, slots in enumerate((full, window)):
            self.rank.enqueue_write(self.rank.forward, part, slots, None)
        with self.rank.on(self.rank.schedule):
            self.rank.allocator.set_full_to_swa_mapping(full, window)
            # As SGLang does with what a forward has computed.
            self.rank.allocator.free_group_begin()
            self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=full))
            self.rank.allocator.free_group_end()
        return full, window

    def evict(self, params=EVERYTHING):
        with self.rank.on(self.rank.schedule):
            self.cache.evict(params)

    def step(self):
        """What the scheduler does on every pass."""
        with self.rank.on(self.rank.schedule):
            self.cache.check_hicache_events()

    @property
    def num_free(self):
        return self.rank.full.available_size(), self.rank.window.available_size()


@pytest.fixture
def trees(monkeypatch):
    monkeypatch.setattr(hooks.runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(SWAComponent, "apply_component_action", hooked(FILL, SWAComponent.apply_component_action))
    return [Tree(monkeypatch, rank) for rank in make_node(monkeypatch, PLAIN)]


def publish(tree):
    """A prompt that the peers find; where its pages lie."""
    slots = tree.insert()
    let_the_device_run([tree.rank])
    tree.step()
    return slots


def test_node_when_it_is_on_its_way_to_the_peers_then_sglang_evicts_it_from_neither_pool(trees):
    tree, other = trees
    tree.insert()
    left = tree.num_free
    tree.evict()
    assert tree.num_free == left and tree.rank.lookup(NAMES) == []
    let_the_device_run([tree.rank])
    assert other.rank.lookup(NAMES) == [NUM_PAGES]
    tree.step()
    tree.evict()
    assert tree.num_free == (TOKENS, TOKENS // 2)


def test_node_when_sglang_has_evicted_it_then_no_page_is_handed_out_before_it_is_withdrawn(trees):
    tree, other = trees
    publish(tree)
    tree.evict()
    assert other.rank.lookup(NAMES) == [NUM_PAGES], "its numbers have not come yet"
    assert len(tree.rank.window.free_pages) < TOKENS // 2 // PAGE
    let_the_device_run([tree.rank])
    assert other.rank.lookup(NAMES, "s") == [] and len(tree.rank.window.free_pages) == TOKENS // 2 // PAGE


def make_tombstone(tree):
    """A prompt that another one goes on from loses its window, and keeps its full pages."""
    publish(tree)
    tree.insert(LONGER)
    let_the_device_run([tree.rank])
    tree.step()
    before = tree.num_free
    tree.evict(EvictParams(swa_num_tokens=NUM_PAGES * PAGE))
    let_the_device_run([tree.rank])
    assert tree.num_free == (before[0], before[1] + NUM_PAGES * PAGE)


def test_tombstone_when_another_request_computes_it_then_peers_find_its_window(trees):
    tree, other = trees
    make_tombstone(tree)
    assert other.rank.lookup(NAMES) == []
    full, window = tree.insert()
    assert other.rank.lookup(NAMES, "s") == [], "the forward that computes it may still run"
    let_the_device_run([tree.rank])
    tree.step()
    assert other.rank.lookup(NAMES, "t") == [NUM_PAGES]
    own = other.rank.load(NAMES, "t")
    assert other.rank.land()
    let_the_device_run([tree.rank, other.rank])
    ours, theirs = other.rank.content(*own), tree.rank.content(full, window)
    assert all(bool((mine == his).all()) for mine, his in zip(ours, theirs, strict=True))


def test_tombstone_when_it_is_evicted_before_its_window_was_offered_then_nobody_finds_it(trees):
    tree, other = trees
    make_tombstone(tree)
    tree.insert()
    tree.evict()
    assert tree.num_free == (TOKENS, TOKENS // 2), "nobody holds it"
    let_the_device_run([tree.rank])
    tree.step()
    assert other.rank.lookup(NAMES) == []
    assert len(tree.rank.window.free_pages) == TOKENS // 2 // PAGE


def test_tombstone_when_its_offer_overtakes_what_was_freed_for_it_then_peers_do_not_find_it(trees):
    """SGLang gave the node other full pages, and freed the old ones: the key goes with them."""
    tree, other = trees
    make_tombstone(tree)
    order = tree.rank.linker.kinds.full.access._rank_device.order
    in_order, order.take = order.take, lambda: None
    tree.insert()
    tree.rank.gpu.run()
    order._senders = deque(sorted(order._senders, key=lambda one: not isinstance(one, DeviceOffloads)))
    in_order()
    assert other.rank.lookup(NAMES) == []
