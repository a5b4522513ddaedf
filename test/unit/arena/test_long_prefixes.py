# SPDX-License-Identifier: Apache-2.0
"""A stored prefix that is longer than what may be read at once, or than the arena: what comes, and what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test.unit.arena.test_prefetch import StoreHost, whole
from test.unit.cache_rig import request
from test.unit.directory.rig import frames, keys

from banyan._native import RankTable
from banyan.arena.page_source import Wanted
from banyan.core import Run, SourceKind

PROMPT = keys(1, 2, 3, 4, 5, 6)


def stored(folder: Path, *, num_frames: int, max_pages: int) -> StoreHost:
    """A rank whose store alone holds the prompt."""
    host = StoreHost(RankTable.create(4), 0, folder, num_frames=num_frames, max_pages=max_pages)
    host.tier.learn([PROMPT])
    for start in (0, 2, 4):
        host.save([3 + start, 4 + start], PROMPT[start : start + 2])
    host.lose()
    assert host.store.lookup(PROMPT).num_pages == len(PROMPT)
    return host


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[StoreHost]:
    """Two pages may be on their way at once, the arena has room for all."""
    host = stored(tmp_path, num_frames=8, max_pages=2)
    yield host
    host.store.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[StoreHost]:
    """The arena has room for four pages of six."""
    host = stored(tmp_path, num_frames=4, max_pages=1000)
    yield host
    host.store.close()


def test_prefix_when_longer_than_what_is_read_at_once_then_its_beginning_comes_and_the_rest_is_computed(
    limited: StoreHost, caplog: pytest.LogCaptureFixture
) -> None:
    before = [limited.rank.pages(frame) for frame in (3, 4)]
    assert limited.fetch(PROMPT, frames(9, 10, 11, 12, 13, 14)) == (Run(SourceKind.STORE, 2),)
    assert [limited.rank.pages(frame) for frame in (9, 10)] == before
    assert limited.counters.reads_dropped_pages == 4
    limited.until(lambda: limited.residency.num_resident == 2)
    limited.lose()
    limited.fetch(PROMPT, frames(9, 10, 11, 12, 13, 14))
    (said,) = [record.getMessage() for record in caplog.records if "lends" in record.getMessage()]
    assert "6 pages" in said and "lends 2" in said and "--banyan-host-gb" in said


def test_prefix_when_its_request_waits_then_it_is_read_as_room_comes_free(limited: StoreHost) -> None:
    before = [limited.rank.pages(frame) for frame in range(3, 9)]
    limited.until(lambda: limited.cache.prepare(request("r"), PROMPT).num_pages == 6)
    limited.until(lambda: limited.residency.num_resident == 6)
    assert limited.fetch(PROMPT, frames(9, 10, 11, 12, 13, 14)) == (Run(SourceKind.HOST, 6),)
    assert [limited.rank.pages(frame) for frame in range(9, 15)] == before


def test_prefix_when_longer_than_the_arena_then_no_read_takes_the_place_of_its_own_beginning(small: StoreHost) -> None:
    before = [small.rank.pages(frame) for frame in range(3, 7)]
    small.prefetch.start_reads(PROMPT[:3], whole)
    small.until(lambda: small.residency.num_resident == 3)
    for _ in range(5):
        num_held = small.cache.prepare(request("r"), PROMPT).num_pages
        assert num_held == 4, "three were there, the fourth frame takes one more"
        small.until(lambda: small.residency.num_resident == 4)
    assert small.fetch(PROMPT, frames(9, 10, 11, 12, 13, 14)) == (Run(SourceKind.HOST, 4),)
    assert [small.rank.pages(frame) for frame in range(9, 13)] == before


def test_arrival_when_the_arena_holds_the_beginning_then_the_rest_does_not_push_it_out(small: StoreHost) -> None:
    small.prefetch.start_reads(PROMPT[:3], whole)
    small.until(lambda: small.residency.num_resident == 3)
    small.tier.ask(Wanted("r", PROMPT, 3, whole))
    assert [small.residency.frame(key) is not None for key in PROMPT[:3]] == [True] * 3
