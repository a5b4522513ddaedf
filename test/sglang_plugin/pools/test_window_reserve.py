# SPDX-License-Identifier: Apache-2.0
"""Room made ahead in two pools, where SGLang's allocator in front of them makes none."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator import swa
from test.sglang_plugin.features.windows.window_gpu import PAGE, TOKENS, make_pool
from test.sglang_plugin.rank.hooked import hooked

from banyan.sglang_plugin.pools import quarantine
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.reserve import Reserve

TARGET = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.evict_to_free_tokens"


class Tree:
    """What is evicted of it, of full pages and of window pages."""

    def __init__(self, *, has_prefixes=True):
        self.evicted = []
        self.supports_prefix_sharing = lambda: has_prefixes

    def evict_for_alloc(self, params):
        self.evicted.append((params.num_tokens, params.swa_num_tokens))


def make_allocator(monkeypatch, kind=DeviceAllocator):
    monkeypatch.setattr(swa, "current_platform", SimpleNamespace(get_paged_allocator_cls=lambda: kind))
    made = swa.SWATokenToKVPoolAllocator(
        TOKENS, TOKENS // 2, PAGE, torch.bfloat16, "cpu", kvcache=make_pool(), need_sort=False
    )
    for part, step_tokens in ((made.full_attn_allocator, 2 * PAGE), (made.swa_attn_allocator, PAGE)):
        part._reserve = Reserve(step_tokens)
    return made


def evict(allocator, tree, num_tokens):
    hooked(TARGET, type(allocator).evict_to_free_tokens)(allocator, tree, num_tokens)
    return tree.evicted


def test_pools_when_they_have_room_then_nothing_is_evicted(monkeypatch):
    assert evict(make_allocator(monkeypatch), Tree(), PAGE) == []


def test_pools_when_little_is_left_then_each_gets_its_own_reserve(monkeypatch):
    allocator = make_allocator(monkeypatch)
    allocator.full_attn_allocator.alloc(TOKENS - PAGE)
    allocator.swa_attn_allocator.alloc(TOKENS // 2 - PAGE)
    assert evict(allocator, Tree(), PAGE) == [(4 * PAGE, 2 * PAGE)], "SGLang itself has enough for one page"


def test_pools_when_one_is_full_then_the_other_is_left_alone(monkeypatch):
    allocator = make_allocator(monkeypatch)
    allocator.swa_attn_allocator.alloc(TOKENS // 2)
    assert evict(allocator, Tree(), PAGE) == [(0, PAGE), (0, 3 * PAGE)], "SGLang's eviction, and the reserve's"


@pytest.mark.parametrize(
    ("tree", "kind"), [(None, DeviceAllocator), (Tree(has_prefixes=False), DeviceAllocator), (Tree(), None)]
)
def test_hook_when_there_is_no_tree_or_the_allocators_are_sglangs_then_nothing_is_asked(monkeypatch, tree, kind):
    allocator = make_allocator(monkeypatch, kind)
    original = hooked(TARGET, lambda allocator, tree_cache, num_tokens: None)
    original(allocator, tree, TOKENS)
    assert tree is None or tree.evicted == []


class Read:
    """A frame table of pages that a peer does not let go of."""

    def retire(self, frames):
        return b""

    def drain(self):
        return b""


@pytest.mark.parametrize(("part", "evicted"), [("full_attn_allocator", (PAGE, 0)), ("swa_attn_allocator", (0, PAGE))])
def test_load_when_a_reader_does_not_let_go_of_a_page_then_others_are_evicted_of_its_pool(monkeypatch, part, evicted):
    """SGLang evicts for both pools by the allocator in front of them, and loads into each by itself."""
    monkeypatch.setattr(quarantine, "OLD_S", 0.01)
    allocator, tree = make_allocator(monkeypatch, QuarantiningAllocator), Tree()
    assert evict(allocator, tree, PAGE) == []
    pages = getattr(allocator, part)
    slots = pages.alloc(pages.available_size())
    pages.attach(Read())
    pages.free(slots[:PAGE])
    pages.load_patience_s = lambda: 0.05
    assert pages.alloc(PAGE) is None and tree.evicted == [evicted]
