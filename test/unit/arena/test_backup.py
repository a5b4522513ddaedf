# SPDX-License-Identifier: Apache-2.0
"""Pages go down and come up again, over the real native core: two ranks with an arena part each, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from test.unit.cache_rig import LAYOUT, make_cache, request
from test.unit.directory.rig import NAMESPACE, NUM_LAYERS, PAGE_BYTES, Rank, frames, keys

from banyan import faults
from banyan._native import FrameTable, Lease, Match, Peers, RankTable, SharedBytes
from banyan.arena import backup
from banyan.arena.backup import Backup
from banyan.arena.backup_copies import Placed
from banyan.arena.residency import Residency
from banyan.core import Run, SourceKind
from banyan.layout import BlockGeometry
from banyan.ports import Copy
from banyan.telemetry import Counters

BLOCK = BlockGeometry(((PAGE_BYTES, PAGE_BYTES),) * NUM_LAYERS)
ARENAS = [LAYOUT.num_ranks + rank for rank in range(LAYOUT.num_ranks)]


class Host:
    """A rank with its part of the arena."""

    def __init__(
        self,
        rank_table: RankTable,
        slot: int,
        *,
        num_frames: int = 8,
        max_pages: int = 100,
        page_bytes: int = PAGE_BYTES,
        block: BlockGeometry = BLOCK,
        make_residency: Callable[[FrameTable, int], Residency] = Residency,
        arenas: Sequence[int] = ARENAS,
    ) -> None:
        self.block = block
        self.rank = Rank(rank_table, slot, page_bytes=page_bytes)
        self.memory = SharedBytes.create(num_frames * block.frame_bytes, f"arena-{slot}")
        member_slot = LAYOUT.num_ranks + slot
        table = block.table()
        self.frame_table = FrameTable(
            rank_table, member_slot, NAMESPACE, self.memory, num_frames, table, block.frame_bytes
        )
        self.view = Peers(rank_table, None, member_slot, NAMESPACE, table, self.memory, block.frame_bytes)
        self.residency = make_residency(self.frame_table, num_frames)
        self.counters = Counters()
        self.backup = Backup(
            residency=self.residency,
            peers=self.view,
            pool_slot=slot,
            pool_slots=range(LAYOUT.num_ranks),
            arena_slots=arenas,
            max_pages=max_pages,
            counters=self.counters,
        )
        self.cache = make_cache(
            self.rank.frame_table, self.rank.peers, slot=slot, slots=[1 - slot, *ARENAS], counters=self.counters
        )

    def wait_landed(self) -> list[Placed]:
        deadline = time.monotonic() + 5
        landed = self.backup.poll()
        while not landed and time.monotonic() < deadline and self.backup._copies._moving:
            time.sleep(0.001)
            landed = self.backup.poll()
        return landed

    def fetch(self, wanted: Sequence[str], targets: np.ndarray) -> tuple[Run, ...]:
        offer = self.cache.prepare(request("r"), list(wanted))
        fetch = self.cache.admit("r", list(wanted)[: offer.num_pages], targets[: offer.num_pages])
        assert fetch is not None and fetch.runs == offer.runs and offer.num_pages
        assert self.cache.finish(self.cache.start())
        return offer.runs


@pytest.fixture
def hosts() -> list[Host]:
    rank_table = RankTable.create(2 * LAYOUT.num_ranks)
    return [Host(rank_table, slot) for slot in range(LAYOUT.num_ranks)]


def test_page_when_it_left_the_pool_then_both_ranks_read_it_back_from_the_arena(hosts: list[Host]) -> None:
    owner, other = hosts
    before = [owner.rank.pages(frame) for frame in (3, 4, 5)]
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    owner.backup.offer(keys(1, 2, 3))
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1, 2, 3)]
    owner.rank.frame_table.retire(frames(3, 4, 5))
    assert other.fetch(keys(1, 2, 3), frames(9, 1, 7)) == (Run(SourceKind.HOST, 3),)
    assert [other.rank.pages(frame) for frame in (9, 1, 7)] == before
    assert owner.fetch(keys(1, 2, 3), frames(10, 11, 12)) == (Run(SourceKind.HOST, 3),)
    assert [owner.rank.pages(frame) for frame in (10, 11, 12)] == before


def test_offer_when_another_part_holds_the_pages_then_one_copy_for_the_node(hosts: list[Host]) -> None:
    for host in hosts:
        host.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    hosts[0].backup.offer(keys(1, 2))
    hosts[0].wait_landed()
    hosts[1].backup.offer(keys(1, 2))
    assert not hosts[1].wait_landed() and hosts[1].residency.num_resident == 0


def test_offer_when_pages_are_on_their_way_then_not_copied_again(hosts: list[Host]) -> None:
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    owner.backup.offer(keys(1, 2))
    owner.backup.offer(keys(1, 2))
    owner.wait_landed()
    assert owner.counters.backed_up_pages == 2 and owner.residency.num_filling == 0


def test_poll_when_several_chains_were_offered_then_one_copy_brings_them(hosts: list[Host]) -> None:
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 7))
    owner.backup.offer(keys(1, 2))
    owner.backup.offer(keys(7))
    owner.backup.poll()
    assert len(owner.backup._copies._moving) == 1
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1, 2), keys(7)]
    for key, frame in zip(keys(1, 2, 7), (3, 4, 5), strict=True):
        owner.rank.frame_table.retire(frames(frame))
        before = owner.rank.pages(frame)
        owner.fetch([key], frames(9))
        assert owner.rank.pages(9) == before


def test_offer_when_more_than_the_bound_is_on_its_way_then_the_rest_follows() -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, max_pages=2)
    owner.rank.frame_table.publish(frames(3, 4, 5, 6, 7), keys(1, 2, 3, 4, 5))
    owner.backup.offer(keys(1, 2, 3, 4, 5))
    landed = [key for _ in range(3) for moved in owner.wait_landed() for key in moved.keys]
    assert landed == keys(1, 2, 3, 4, 5) and owner.counters.backups_dropped_pages == 0
    assert not owner.wait_landed()


@pytest.mark.parametrize("max_pages", [2, 100])
def test_offer_when_the_chain_is_longer_than_the_arena_then_its_beginning_stays(max_pages: int) -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, num_frames=4, max_pages=max_pages)
    names = keys(1, 2, 3, 4, 5, 6)
    owner.rank.frame_table.publish(frames(3, 4, 5, 6, 7, 8), names)
    owner.backup.offer(names)
    while owner.wait_landed():
        pass
    owner.backup.offer(names)
    while owner.wait_landed():
        pass
    assert [owner.residency.frame(key) is not None for key in names] == [True] * 4 + [False] * 2


def test_offer_when_pages_have_left_the_pool_before_their_turn_then_dropped_and_counted() -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, max_pages=2)
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    owner.backup.offer(keys(1, 2, 3))
    owner.rank.frame_table.retire(frames(5))
    owner.wait_landed()
    assert not owner.wait_landed()
    assert owner.counters.backed_up_pages == 2 and owner.counters.backups_dropped_pages == 1


def test_offer_when_too_many_wait_for_their_turn_then_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "MAX_QUEUED_PAGES", 1)
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, max_pages=2)
    owner.rank.frame_table.publish(frames(3, 4, 5, 6), keys(1, 2, 3, 4))
    owner.backup.offer(keys(1, 2, 3, 4))
    assert owner.counters.backups_dropped_pages == 3
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1)]


def test_offer_when_chains_without_frames_fill_the_queue_then_those_of_another_owner_are_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutFrames(Residency):
        def owner_of(self, names: Sequence[str]) -> str:
            return "other" if names[0] in keys(7) else "without"

        def claim(self, num_frames: int, sparing: Sequence[str] = (), names: Sequence[str] = ()) -> list[int]:
            return super().claim(num_frames, sparing, names) if self.owner_of(names) == "other" else []

    monkeypatch.setattr(backup, "MAX_QUEUED_PAGES", 3)
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, make_residency=WithoutFrames)
    owner.rank.frame_table.publish(frames(3, 4, 5, 6), keys(1, 2, 3, 7))
    owner.backup.offer(keys(1, 2))
    owner.backup.offer(keys(3))
    assert not owner.wait_landed()
    owner.backup.offer(keys(7))
    assert [landed.keys for landed in owner.wait_landed()] == [keys(7)]
    assert owner.counters.backups_dropped_pages == 2 and owner.backup._num_queued == 1


def test_pages_when_no_frame_was_free_then_they_are_copied_once_one_is(hosts: list[Host]) -> None:
    owner = hosts[0]
    taken = owner.residency.claim(8)
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    owner.backup.offer(keys(1, 2))
    assert not owner.wait_landed()
    owner.residency.abandon(taken)
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1, 2)]


def test_pages_when_every_frame_was_held_then_they_are_looked_at_again_after_a_while_and_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, num_frames=2)
    now_s = 100.0
    monkeypatch.setattr(owner.backup, "_clock", lambda: now_s)
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 7))
    owner.backup.offer(keys(1, 2))
    owner.wait_landed()
    owner.residency.hold([0, 1])
    owner.backup.offer(keys(7))
    assert not owner.wait_landed()
    owner.residency.unhold([0, 1])
    assert not owner.wait_landed(), "not at every step"
    now_s += backup.LOOK_AGAIN_S
    assert [landed.keys for landed in owner.wait_landed()] == [keys(7)]


def test_chains_when_every_frame_is_held_then_one_look_claims_once_and_the_next_begins_with_another_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each claim walks past all that is held: a queue of them stops the scheduler."""
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, num_frames=2)
    now_s, claimed = 100.0, []
    monkeypatch.setattr(owner.backup, "_clock", lambda: now_s)
    owner.rank.frame_table.publish(frames(3, 4, 5, 6), keys(1, 2, 7, 8))
    owner.backup.offer(keys(1, 2))
    owner.wait_landed()
    owner.residency.hold([0, 1])
    claim = owner.residency.claim
    monkeypatch.setattr(
        owner.residency, "claim", lambda num, behind, names: claimed.append(names) or claim(num, behind, names)
    )
    for number in (9, 7, 8):
        owner.backup.offer(keys(number))
    owner.backup.poll()
    assert claimed == [keys(7)], "the pool has no page of the first chain"
    now_s += backup.LOOK_AGAIN_S
    owner.backup.poll()
    assert claimed == [keys(7), keys(8)]
    owner.residency.unhold([0])
    now_s += backup.LOOK_AGAIN_S
    assert [landed.keys for landed in owner.wait_landed()] == [keys(7)]


def test_offer_when_the_pool_has_withdrawn_the_pages_then_nothing_is_held(hosts: list[Host]) -> None:
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3), keys(1))
    owner.rank.frame_table.retire(frames(3))
    owner.backup.offer(keys(1))
    assert owner.residency.num_filling == 0 and not owner.wait_landed()


def test_poll_when_much_is_to_go_down_then_in_several_copies_each_of_which_gives_its_pages_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_table = RankTable.create(2 * LAYOUT.num_ranks)
    owner = Host(rank_table, 0, max_pages=8)
    sent: list[int] = []

    class Counting:
        lookup, holders, lease = owner.view.lookup, owner.view.holders, owner.view.lease

        def start_copy(self, loads: Sequence[tuple[Lease, Sequence[int]]]) -> Copy:
            sent.append(sum(len(frames) for _, frames in loads))
            return owner.view.start_copy(loads)

    monkeypatch.setattr(owner.backup._copies, "_peers", Counting())
    owner.rank.frame_table.publish(frames(1, 2, 3, 4, 5, 6, 7), keys(1, 2, 3, 4, 5, 6, 7))
    for chain in (keys(1), keys(2), keys(3, 4, 5), keys(6), keys(7)):
        owner.backup.offer(chain)
    landed = owner.wait_landed()
    while len(landed) < 5:
        landed += owner.wait_landed()
    assert sent == [2, 3, 2], "two pages at most, but for a chain that has more"
    assert [one.keys for one in landed] == [keys(1), keys(2), keys(3, 4, 5), keys(6), keys(7)]


class Panic(BaseException):
    """As native code raises it."""


@pytest.mark.parametrize("error", [OSError, RuntimeError, Panic])
@pytest.mark.parametrize("failing", ["start_copy", "lease"])
def test_offer_when_no_copy_can_be_begun_then_frames_and_leases_are_free_and_the_next_one_lands(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, failing: str, error: type[BaseException]
) -> None:
    """It is tried again in every step: a server that lost what it had claimed would soon have no frame."""

    class Failing:
        lookup = hosts[0].view.lookup

        def lease(self, found: Match, wanted: list[str]) -> Lease | None:
            if failing == "lease" and wanted == keys(7):
                raise error("no more of them")
            return hosts[0].view.lease(found, wanted)

        def start_copy(self, loads: object) -> None:
            raise error("no more of them")

    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 7))
    for _ in range(2):
        owner.backup.offer(keys(1, 2))
        owner.backup.offer(keys(7))
        with monkeypatch.context() as patched:
            patched.setattr(owner.backup._copies, "_peers", Failing())
            owner.backup.poll()
    assert owner.residency.num_filling == 0 and owner.counters.backups_failed == 2
    assert faults.counts()["backup.send"] >= 2
    owner.backup.offer(keys(1, 2))
    owner.backup.offer(keys(7))
    assert [landed.keys for landed in owner.wait_landed()] == [keys(1, 2), keys(7)]
    assert owner.rank.frame_table.retire(frames(3, 4, 5)) == frames(3, 4, 5).tobytes()


def test_arena_when_full_then_pages_that_were_asked_for_stay(hosts: list[Host]) -> None:
    owner, other = hosts
    for number in range(8):
        owner.rank.frame_table.publish(frames(number), keys(number))
        owner.backup.offer(keys(number))
        owner.wait_landed()
    # Both pools hold it, so nobody leases it; the prompt that asks for it says that it is wanted.
    owner.view.touch(owner.view.lookup(keys(0), ARENAS))
    owner.rank.frame_table.publish(frames(9), keys(9))
    owner.backup.offer(keys(9))
    owner.wait_landed()
    owner.rank.frame_table.reset()
    assert other.fetch(keys(0), frames(1)) == (Run(SourceKind.HOST, 1),)
    assert other.cache.prepare(request("other"), keys(1)).num_pages == 0
