# SPDX-License-Identifier: Apache-2.0
"""Pages go down when they leave the pool, over the real native core: pool and arena together hold more."""

from __future__ import annotations

import time

import pytest
from test.unit.arena.test_backup import Host
from test.unit.cache_rig import LAYOUT
from test.unit.directory.rig import frames, keys

from banyan._native import Lease, Match, RankTable
from banyan.core import Run, SourceKind


@pytest.fixture
def owner() -> Host:
    """Its arena is full."""
    host = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, num_frames=2)
    host.rank.frame_table.publish(frames(0, 1), keys(8, 9))
    host.backup.offer(keys(8, 9))
    host.wait_landed()
    host.rank.frame_table.retire(frames(0, 1))
    host.backup.write_back.begin()
    return host


def drained(host: Host, num_frames: int) -> int:
    """How many frames of the pool come out of quarantine, waited for."""
    num_bytes, deadline = 0, time.monotonic() + 5
    while num_bytes < 8 * num_frames and time.monotonic() < deadline:
        num_bytes += len(host.rank.frame_table.drain())
    return num_bytes // 8


def test_page_when_it_lies_in_the_pool_then_it_takes_no_other_ones_frame_before_it_leaves(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    owner.backup.offer(keys(1, 2))
    assert not owner.wait_landed()
    assert owner.view.lookup(keys(8, 9)).num_pages == 2
    assert owner.backup.write_back.leaving(keys(1, 2))
    owner.backup.write_back.send()
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1, 2)]
    assert owner.view.lookup(keys(8, 9)).num_pages == 0


def test_page_when_it_leaves_then_its_frame_is_not_handed_out_before_it_is_down(owner: Host) -> None:
    before = [owner.rank.pages(frame) for frame in (3, 4)]
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    assert owner.backup.write_back.leaving(keys(1, 2))
    assert owner.rank.frame_table.retire(frames(3, 4)) == b""
    assert owner.rank.frame_table.drain() == b""
    owner.backup.write_back.send()
    assert drained(owner, 2) == 2
    owner.wait_landed()
    assert not owner.backup.write_back.is_copying
    assert owner.fetch(keys(1, 2), frames(10, 11)) == (Run(SourceKind.HOST, 2),)
    assert [owner.rank.pages(frame) for frame in (10, 11)] == before


def test_pages_when_they_leave_one_after_the_other_then_one_copy_takes_them_and_a_poll_sends_it(
    owner: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, begun = owner.view, []

    class Counting:
        lookup, holders, touch, lease = view.lookup, view.holders, view.touch, view.lease

        def start_copy(self, loads: list[object]) -> object:
            begun.append(len(loads))
            return view.start_copy(loads)

    monkeypatch.setattr(owner.backup._copies, "_peers", Counting())
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 7))
    assert owner.backup.write_back.leaving(keys(1)) and owner.backup.write_back.leaving(keys(7))
    owner.backup.poll()
    owner.wait_landed()
    assert begun == [2]
    assert all(owner.residency.frame(key) is not None for key in keys(1, 7))


def test_page_when_the_arena_has_it_or_it_is_on_its_way_then_it_stays_without_a_copy(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4), keys(8, 1))
    assert owner.backup.write_back.leaving(keys(8))
    assert owner.backup.write_back.leaving(keys(1)) and owner.backup.write_back.leaving(keys(1))
    owner.wait_landed()
    assert owner.counters.backed_up_pages == 2 + 1


def test_page_when_no_frame_can_be_had_then_it_is_lost_and_counted(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    owner.residency.hold([0, 1])
    assert not owner.backup.write_back.leaving(keys(1, 2))
    assert owner.counters.backups_dropped_pages == 2 and not owner.backup.write_back.has_room
    owner.residency.unhold([0])
    assert not owner.backup.write_back.leaving(keys(1, 2)), "no other try before what is leased is sent"
    owner.backup.write_back.send()
    assert not owner.backup.write_back.leaving(keys(1, 2)), "only the first"
    assert owner.counters.backups_dropped_pages == 5
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1)]


def test_page_when_it_is_not_in_the_pool_then_nothing_is_claimed(owner: Host) -> None:
    assert not owner.backup.write_back.leaving(keys(1))
    assert owner.residency.num_filling == 0 and owner.view.lookup(keys(8, 9)).num_pages == 2


def test_pages_when_they_are_to_be_fetched_then_nothing_that_leaves_takes_their_frames(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    with owner.backup.write_back.sparing(keys(8, 9)):
        assert not owner.backup.write_back.leaving(keys(1, 2))
        assert owner.view.lookup(keys(8, 9)).num_pages == 2
    owner.backup.write_back.send()
    assert owner.backup.write_back.leaving(keys(1, 2)) and not owner.backup.write_back.has_room, "two are lost for them"


def test_pages_when_they_have_come_up_into_the_pool_then_their_frames_are_taken_first(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4), keys(9, 1))
    owner.backup.offer(keys(9))
    assert owner.backup.write_back.leaving(keys(1))
    assert owner.residency.frame(keys(8)[0]) is not None and owner.residency.frame(keys(9)[0]) is None


def test_page_when_it_had_come_up_and_leaves_again_then_it_does_not_go_first_any_more(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4), keys(9, 1))
    owner.backup.offer(keys(9))
    assert owner.backup.write_back.leaving(keys(9)) and owner.backup.write_back.leaving(keys(1))
    assert owner.residency.frame(keys(9)[0]) is not None and owner.residency.frame(keys(8)[0]) is None


def test_pages_when_they_leave_then_there_is_room_while_nobody_loses_a_page_for_them(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(9, 1, 2))
    owner.backup.offer(keys(9))
    assert owner.backup.write_back.leaving(keys(1)) and owner.backup.write_back.has_room
    assert owner.backup.write_back.leaving(keys(2)) and not owner.backup.write_back.has_room


def test_page_when_another_part_has_one_of_its_chain_then_only_the_others_go_down() -> None:
    rank_table = RankTable.create(2 * LAYOUT.num_ranks)
    owner, other = (Host(rank_table, slot, num_frames=4) for slot in (0, 1))
    other.rank.frame_table.publish(frames(3), keys(2))
    other.backup.offer(keys(2))
    other.wait_landed()
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    owner.backup.write_back.begin()
    assert owner.backup.write_back.leaving(keys(1, 2, 3))
    owner.backup.write_back.send()
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1), keys(3)]
    assert owner.residency.num_free == 2


def test_pages_when_frames_are_free_then_they_go_down_before_they_leave() -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, num_frames=2)
    owner.backup.write_back.begin()
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    owner.backup.offer(keys(1, 2, 3))
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1, 2)]
    assert not owner.backup._queue and owner.counters.backups_dropped_pages == 0


def test_pages_when_more_frames_are_free_than_go_down_at_once_then_the_rest_follows() -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, max_pages=2)
    owner.backup.write_back.begin()
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    owner.backup.offer(keys(1, 2, 3))
    assert [key for _ in range(2) for landed in owner.wait_landed() for key in landed.keys] == keys(1, 2, 3)


def test_backup_when_nobody_tells_any_more_what_leaves_then_pages_go_down_as_they_come(owner: Host) -> None:
    owner.backup.write_back.end()
    owner.rank.frame_table.publish(frames(3), keys(1))
    owner.backup.offer(keys(1))
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1)]


def test_pages_when_they_have_left_and_nobody_sends_them_then_frames_and_leases_are_free(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3), keys(1))
    assert owner.backup.write_back.leaving(keys(1))
    owner.backup.write_back.end()
    assert owner.residency.num_filling == 0 and not owner.wait_landed()
    assert owner.rank.frame_table.retire(frames(3)) == frames(3).tobytes()


class Panic(BaseException):
    """As native code raises it."""


@pytest.mark.parametrize("error", [OSError, Panic])
@pytest.mark.parametrize("failing", ["start_copy", "lease"])
def test_pages_when_no_copy_can_be_begun_then_frames_and_leases_are_free_and_the_next_one_lands(
    owner: Host, monkeypatch: pytest.MonkeyPatch, failing: str, error: type[BaseException]
) -> None:
    view = owner.view

    class Failing:
        lookup, holders, touch = view.lookup, view.holders, view.touch

        def lease(self, found: Match, wanted: list[str]) -> Lease | None:
            if failing == "lease" and wanted == keys(7):
                raise error("no more of them")
            return view.lease(found, wanted)

        def start_copy(self, loads: object) -> None:
            raise error("no more of them")

    owner.rank.frame_table.publish(frames(3, 4), keys(1, 7))
    with monkeypatch.context() as patched:
        patched.setattr(owner.backup._copies, "_peers", Failing())
        with pytest.raises(error, match="no more"):
            owner.backup.write_back.leaving(keys(1))
            owner.backup.write_back.leaving(keys(7))
            owner.backup.write_back.send()
        owner.backup.poll()
    assert owner.residency.num_filling == 0 and not owner.backup.write_back.is_copying
    assert owner.rank.frame_table.retire(frames(3, 4)) == frames(3, 4).tobytes()
    owner.rank.frame_table.publish(frames(5), keys(2))
    assert owner.backup.write_back.leaving(keys(2))
    assert [landed.keys for landed in owner.wait_landed()] == [keys(2)]


def test_quiesce_when_pages_are_leaving_then_nothing_is_held(owner: Host) -> None:
    owner.rank.frame_table.publish(frames(3), keys(1))
    assert owner.backup.write_back.leaving(keys(1))
    owner.backup.quiesce()
    assert owner.residency.num_filling == 0 and not owner.backup.write_back.is_copying
    assert owner.rank.frame_table.retire(frames(3)) == frames(3).tobytes()
