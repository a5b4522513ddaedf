# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of whose its pages are, over a real rank; SGLang's tree is stood in for."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from test.sglang_plugin.rank.evicting.test_eviction import Cache, prompt
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, polled_until, transfer
from test.unit.directory.rig import keys

from banyan import _native
from banyan.arena.residency import Residency
from banyan.config import Config
from banyan.routing.tenant_secret import SALT_CHARS
from banyan.sglang_plugin import runtime

OFFLOAD = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper._offload_node"
ACME = "a" * SALT_CHARS


def made(monkeypatch, core="python", **flags):
    """A rank's residency, and what has a node of SGLang's own tree core offered to it."""
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, **flags)
    # Features look at the configuration before SGLang's process has any.
    monkeypatch.setattr(runtime, "config", lambda: config)
    rank, _, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
    cache, tier = Cache(core), rank.kinds.full.tier

    def offer(salt, number, names):
        key = RadixKey(array("q", prompt(number, len(names))), cache_salt=salt)
        step = cache.tree_core.begin_insert(InsertParams(key=key, value=torch.arange(len(key))))
        while step.result is None:
            step = cache.tree_core.resume_insert()
        cache.tree_core.end_insert()
        num_pages = tier.state()["num_arena_pages"] + len(names)

        def offload_node(wrapper, node_id, transfers):
            rank.offload(transfers)

        hook = hooked(OFFLOAD, offload_node)
        hook(
            SimpleNamespace(cache=cache), step.result.last_device_node, transfer(names, pages.alloc(len(names) * PAGE))
        )
        rank.num_completed_offloads()
        polled_until(rank, lambda: tier.state()["num_arena_pages"] == num_pages)

    return tier.residency, offer


@pytest.mark.parametrize("core", ["python", "rust"])
def test_pages_when_a_node_of_the_tree_is_offered_then_their_frames_are_its_tenants(monkeypatch, core):
    residency, offer = made(monkeypatch, core, tenant_share=0.5, tenant_secret_file="secret")
    offer(f"{ACME}mine", 1, keys(1, 2))
    offer(None, 2, keys(3))
    offer(ACME, 3, keys(4))
    owner_of = residency._owners._owner_of
    assert [owner_of[residency.frame(key)] for key in keys(1, 2, 3, 4)] == [ACME, ACME, "", ACME]


def test_pages_when_no_share_is_asked_for_then_nobody_counts_them(monkeypatch):
    residency, offer = made(monkeypatch)
    offer(ACME, 1, keys(1, 2))
    assert type(residency) is Residency
