# SPDX-License-Identifier: Apache-2.0
"""Memory that is given back to a trainer: nobody reads a pool that goes, and weights that are lost name no page.

The function of SGLang is stood in for; the hook on it is that of the patch queue.
"""

from types import SimpleNamespace

import pytest
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_weights import UPDATER, finds, ranks, share

from banyan.sglang_plugin.rank import linker as module
from banyan.sglang_plugin.rank import memory

__all__ = ["ranks"]


@pytest.fixture
def release(monkeypatch):
    """Gives memory back as SGLang does; ``then`` is what SGLang does itself."""

    def run(linker, *tags, saves=True, keeps_weights=False, then=lambda: None):
        monkeypatch.setattr(module, "_installed", linker)
        features = SimpleNamespace(enable_memory_saver=saves, enable_weights_cpu_backup=keeps_weights)
        monkeypatch.setattr(memory, "get_exec", lambda: SimpleNamespace(features=features))
        body = hooked(UPDATER + "release_memory_occupation", lambda updater, command: then())
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
