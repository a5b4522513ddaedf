# SPDX-License-Identifier: Apache-2.0
"""Memory that is given back to a trainer: nobody reads a pool that goes, and weights that are lost name no page.

The function of SGLang is stood in for; the hook on it is that of the patch queue.
"""

from types import SimpleNamespace

import pytest
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_weights import UPDATER, call, finds, ranks, share

from banyan import patches
from banyan.sglang_plugin.rank import linker as module
from banyan.sglang_plugin.rank import memory

__all__ = ["call", "ranks"]


@pytest.fixture
def release(monkeypatch):
    """Gives memory back as SGLang does; ``then`` is what SGLang does itself."""

    def run(linker, *tags, saves=True, keeps_weights=False, then=lambda: None):
        monkeypatch.setattr(module, "_installed", linker)
        features = SimpleNamespace(enable_memory_saver=saves, enable_weights_cpu_backup=keeps_weights)
        monkeypatch.setattr(memory, "get_exec", lambda: SimpleNamespace(features=features))
        queue = [patch for patch in patches.load_queue() if patch.name == "33-memory-released"]
        body = hooked(UPDATER + "release_memory_occupation", lambda updater, command: then(), queue)
        body(SimpleNamespace(), ReleaseMemoryOccupationReqInput(tags=list(tags) or None))

    return run


@pytest.mark.parametrize("tags", [(), (GPU_MEMORY_TYPE_KV_CACHE,)])
def test_memory_when_the_pool_goes_then_nobody_finds_a_page_in_it_before(ranks, release, tags):
    (owner, _, pages), (reader, *_) = ranks
    slots = share(owner, pages, 1)
    found = []
    assert finds(reader, 1)
    release(owner, *tags, keeps_weights=True, then=lambda: found.append(finds(reader, 1)))
    assert found == [False]
    pages.free(slots)
    owner.reset()
    share(owner, pages, 2)
    assert finds(reader, 2)


def test_memory_when_the_pool_stays_then_its_pages_are_lent(ranks, release):
    (owner, _, pages), (reader, *_) = ranks
    share(owner, pages, 1)
    release(owner, GPU_MEMORY_TYPE_CUDA_GRAPH)
    assert finds(reader, 1)


@pytest.mark.parametrize(
    ("saves", "keeps_weights", "are_the_same"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_memory_when_weights_go_then_pages_of_what_comes_back_are_theirs_only_where_they_were_kept(
    ranks, release, saves, keeps_weights, are_the_same
):
    (owner, _, pages), (reader, *_) = ranks
    release(owner, GPU_MEMORY_TYPE_WEIGHTS, saves=saves, keeps_weights=keeps_weights)
    share(owner, pages, 1)
    assert finds(reader, 1) is are_the_same
    release(reader, GPU_MEMORY_TYPE_WEIGHTS, saves=saves, keeps_weights=keeps_weights)
    share(owner, pages, 2)
    assert finds(reader, 2)


def test_memory_when_one_rank_alone_has_given_its_weights_then_it_meets_the_others_after_a_whole_update_only(
    ranks, release, call
):
    (owner, _, pages), (reader, *_) = ranks
    # The other one was busy, and has refused.
    release(owner, GPU_MEMORY_TYPE_WEIGHTS)
    for number, linker in enumerate((reader, owner, reader, owner)):
        slots = share(owner, pages, number)
        call(linker, "update_weights_from_tensor", flushes=True)
        assert not finds(reader, number)
        pages.free(slots)
        owner.reset()
    for linker in (owner, reader):
        call(linker, "update_weights_from_disk", flushes=True)
    share(owner, pages, 5)
    assert finds(reader, 5)
