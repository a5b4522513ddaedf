# SPDX-License-Identifier: Apache-2.0
"""A flush that a rank refuses or puts off: what it was to remove is lent to nobody, from no place.

The function of SGLang is stood in for; the hook on it is that of the patch queue.
"""

from types import SimpleNamespace

import pytest
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, polled_until, transfer
from test.unit.directory.rig import keys

from banyan import _native
from banyan.config import Config
from banyan.core import SourceKind
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import linker as module

HANDLE = "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle"
DONE, REFUSED, PUT_OFF = SimpleNamespace(success=True), SimpleNamespace(success=False), None


@pytest.fixture(params=[0.0, 0.001], ids=["pools", "pools and arena"])
def ranks(monkeypatch, request):
    """An owner and a reader. With an arena what the owner shares is there, too."""
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    config, rank_table = Config(min_fetch_tokens=PAGE, host_gb=request.param), _native.RankTable.create(4)
    (owner, _, pages), (reader, *_) = [make_rank(monkeypatch, rank_table, rank, config) for rank in (0, 1)]

    def share(number):
        owner.offload(transfer(keys(number), pages.alloc(PAGE)))
        owner.num_completed_offloads()
        if request.param:
            polled_until(owner, lambda: owner.cache.copies_of(keys(number)) == [SourceKind.HOST])

    def finds(number):
        return reader.lookup(f"request {number}", transfer(keys(number), None)) != []

    monkeypatch.setattr(module, "_installed", owner)
    return share, finds


def flush(answer):
    assert hooked(HANDLE, lambda *args: answer)(SimpleNamespace(), SimpleNamespace(timeout_s=0)) is answer


@pytest.mark.parametrize("answer", [REFUSED, PUT_OFF], ids=["refused", "put off"])
def test_flush_when_a_rank_does_not_do_it_then_its_pages_are_found_no_more_and_those_that_come_later_are(ranks, answer):
    share, finds = ranks
    share(1)
    assert finds(1)
    flush(answer)
    assert not finds(1)
    share(2)
    assert finds(2)


def test_flush_when_a_rank_has_done_it_then_nothing_is_withdrawn_beside_what_sglang_removes(ranks):
    share, finds = ranks
    share(1)
    flush(DONE)
    assert finds(1)
