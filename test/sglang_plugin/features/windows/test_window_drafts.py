# SPDX-License-Identifier: Apache-2.0
"""A draft beside a model with sliding windows: its rows go with the pages at whose slots they lie, of full pages or of
window pages, and are waited for with the model's last layer, whichever pool that is in."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from test.sglang_plugin.features.windows.test_window_places import NUM_SLOTS, PAGE, WindowRank
from test.sglang_plugin.features.windows.window_gpu import PLAIN, TOKENS, equal, make_node, publish
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.test_extents import SMALL_HEADS, with_drafts
from test.sglang_plugin.rank.test_linker import page
from test.unit.directory.rig import keys

from banyan import _native
from banyan.config import Config
from banyan.features.windows.pools import two_pools
from banyan.restorable import WindowPages, reached_in_turn
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool
from banyan.sglang_plugin.runtime import Refused

POOLS_ONLY = Config(min_fetch_tokens=PAGE, host_gb=0.0)


def draft_behind(pool):
    """A draft at the slots of full pages, made where SGLang makes it, with something in it."""
    (draft,) = with_drafts(pool, SharedMHAPool, SMALL_HEADS).drafts
    for buffer in (*draft.k_buffer, *draft.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    pool.draft = draft
    return (draft,)


@pytest.fixture(params=[0.0, 0.001], ids=["pools", "pools and arena"])
def ranks(monkeypatch, request):
    rank_table, config = _native.RankTable.create(NUM_SLOTS), Config(min_fetch_tokens=PAGE, host_gb=request.param)
    return [WindowRank(monkeypatch, rank_table, rank, config, make_drafts=draft_behind) for rank in (0, 1)]


def test_prefix_when_there_is_a_draft_then_its_rows_come_with_the_full_pages(ranks):
    owner, reader = ranks
    names = keys(1, 2, 3)
    full, window = owner.offload(names)
    assert reader.lookup(names) == [3]
    own_full, own_window = reader.load(names)
    assert reader.land()
    assert torch.equal(reader.full_pages(own_full), owner.full_pages(full))
    assert torch.equal(reader.window_pages(own_window), owner.window_pages(window[PAGE:]))
    assert torch.equal(page(reader.pool.draft, own_full), page(owner.pool.draft, full))


def test_arena_when_the_pool_has_given_pages_up_then_the_drafts_rows_come_from_it(monkeypatch):
    rank_table, config = _native.RankTable.create(NUM_SLOTS), Config(min_fetch_tokens=PAGE, host_gb=0.001)
    owner, reader = (WindowRank(monkeypatch, rank_table, rank, config, make_drafts=draft_behind) for rank in (0, 1))
    names = keys(1, 2)
    full, window = owner.offload(names)
    held = page(owner.pool.draft, full).clone()
    tiers = (owner.linker.kinds.full.tier, owner.linker.kinds.beside[0].tier)
    owner.until(lambda: all(tier.state()["num_arena_pages"] == 2 for tier in tiers))
    owner.allocator.full_attn_allocator.free(full)
    owner.allocator.swa_attn_allocator.free(window)
    assert reader.lookup(names) == [2]
    own_full, _ = reader.load(names)
    assert reader.land()
    assert torch.equal(page(reader.pool.draft, own_full), held)


def test_page_when_it_has_no_draft_behind_it_then_a_server_that_drafts_does_not_find_it(monkeypatch):
    rank_table = _native.RankTable.create(NUM_SLOTS)
    owner = WindowRank(monkeypatch, rank_table, 0, POOLS_ONLY)
    owner.offload(keys(1, 2))
    reader = WindowRank(monkeypatch, rank_table, 1, POOLS_ONLY, make_drafts=draft_behind)
    assert reader.lookup(keys(1, 2)) == []


def test_draft_when_its_pool_is_not_banyans_then_refused_by_its_class(monkeypatch, capsys):
    def of_sglang(pool):
        return with_drafts(pool, MHATokenToKVPool, SMALL_HEADS).drafts

    with pytest.raises((SystemExit, Refused)):
        WindowRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, POOLS_ONLY, make_drafts=of_sglang)
    assert "a MHATokenToKVPool" in capsys.readouterr().err


class Waited:
    """A copy of so many layers: what it was asked to wait for."""

    def __init__(self):
        self.layers = []

    def wait_layer(self, layer):
        self.layers.append(layer)
        return 0.0


@pytest.mark.parametrize("last", [0, 1], ids=["full attention last", "a window last"])
def test_last_layer_when_drafts_lie_behind_either_kind_then_it_waits_for_all_of_both(last):
    """Three layers of the model, one draft behind the full pages and two behind the window pages."""
    order = [(1 - last, 0), (last, 0), (last, 1)]
    pages = WindowPages(None, None, num_pages=2, reached=reached_in_turn(order), num_draft_layers=(1, 2))
    full, windows = Waited(), Waited()
    copy = pages.joined(full, windows)
    for layer in range(3):
        copy.wait_layer(layer)
    num_layers = (2, 1) if last == 0 else (1, 2)
    assert (full.layers[-1], windows.layers[-1]) == (num_layers[0], num_layers[1] + 1)
    assert max(full.layers[:-1], default=-1) < num_layers[0]


def windows_of_a_draft(*, at_full_slots):
    """A draft of two layers, one of which has a window, as SGLang makes one on a GPU."""
    own = {name: value for name, value in rig.POOL.items() if name not in ("size", "layer_num")}
    pool = SWAKVPool(
        size=TOKENS,
        size_swa=TOKENS if at_full_slots else TOKENS // 2,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        token_to_kv_pool_class=DeviceMHAPool,
        **own,
    )
    pool.swa_uses_full_indices = at_full_slots
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
    return pool


@pytest.mark.parametrize("at_full_slots", [True, False])
def test_draft_when_it_has_windows_of_its_own_then_they_come_from_where_it_keeps_them(monkeypatch, at_full_slots):
    monkeypatch.setattr(two_pools.runtime, "is_on_gpu", lambda: True)
    owner, reader = make_node(
        monkeypatch, PLAIN, make_drafts=lambda: (windows_of_a_draft(at_full_slots=at_full_slots),)
    )
    names = keys(1, 2)
    full, window = publish(owner, names)
    assert reader.lookup(names) == [2]
    own_full, own_window = reader.load(names)
    index = reader.enqueue_forward()
    reader.gpu.run()
    assert reader.finish(index)
    assert equal(reader.content(own_full, own_window), owner.content(full, window))
    (mine,), (theirs,) = reader.drafts, owner.drafts
    assert torch.equal(page(mine.full_kv_pool, own_full), page(theirs.full_kv_pool, full))
    slots, own_slots = (full, own_full) if at_full_slots else (window, own_window)
    assert torch.equal(page(mine.swa_kv_pool, own_slots), page(theirs.swa_kv_pool, slots))


def test_draft_when_all_its_layers_have_windows_then_its_other_pool_is_none(monkeypatch):
    """A layer for each step, of which each may be of either kind."""
    monkeypatch.setattr(two_pools.runtime, "is_on_gpu", lambda: True)
    own = {name: value for name, value in rig.POOL.items() if name not in ("size", "layer_num")}
    pool = SWAKVPool(
        size=TOKENS,
        size_swa=TOKENS,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[],
        token_to_kv_pool_class=DeviceMHAPool,
        **own,
    )
    pool.swa_uses_full_indices = True
    assert two_pools.drafts_apart([pool]) == ([pool.swa_kv_pool], [])


def test_draft_when_its_windows_lie_at_the_models_on_a_host_then_refused(monkeypatch, capsys):
    monkeypatch.setattr(two_pools.runtime, "is_on_gpu", lambda: False)
    part = SimpleNamespace(layer_num=1)
    pool = SWAKVPool.__new__(SWAKVPool)
    pool.full_kv_pool, pool.swa_kv_pool = part, part
    with pytest.raises((SystemExit, Refused)):
        two_pools.drafts_apart([pool])
    line = capsys.readouterr().err
    assert "windows at the slots of the model's" in line and "--banyan-share off" in line
