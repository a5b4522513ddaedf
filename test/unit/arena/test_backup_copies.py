# SPDX-License-Identifier: Apache-2.0
"""What becomes of pages between the pool and the arena, over the real native core."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test.unit.arena.test_backup import ARENAS, Host
from test.unit.cache_rig import LAYOUT
from test.unit.directory.rig import frames, keys

from banyan._native import Match, RankTable


@pytest.fixture
def hosts() -> list[Host]:
    rank_table = RankTable.create(2 * LAYOUT.num_ranks)
    return [Host(rank_table, slot) for slot in range(LAYOUT.num_ranks)]


def test_offer_when_two_ranks_are_as_quick_then_one_copy_stays(hosts: list[Host]) -> None:
    for host in hosts:
        host.rank.frame_table.publish(frames(3, 4), keys(1, 2))
        host.backup.offer(keys(1, 2))
    for host in hosts:
        host.wait_landed()
    assert [host.residency.num_resident for host in hosts] == [2, 0]
    assert len(hosts[1].residency.claim(8)) == 8, "the frames of the second copy are free again"


def test_offer_when_another_part_gets_a_page_of_the_chain_meanwhile_then_only_the_others_are_published(
    hosts: list[Host],
) -> None:
    for host, chain in zip(hosts, (keys(1, 2, 3), keys(2)), strict=True):
        host.rank.frame_table.publish(frames(*range(3, 3 + len(chain))), chain)
        host.backup.offer(chain)
        host.backup.poll()
    hosts[1].wait_landed()
    assert [landed.keys for landed in hosts[0].wait_landed()] == [keys(1, 3)]
    assert len(hosts[0].residency.claim(8)) == 8, "the frame of the second copy is free again"


def test_offer_when_the_node_has_one_part_of_the_arena_then_its_own_book_says_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Host(RankTable.create(2 * LAYOUT.num_ranks), 0, arenas=ARENAS[:1])
    asked: list[Sequence[int]] = []

    class Asked:
        holders, lease, start_copy = owner.view.holders, owner.view.lease, owner.view.start_copy

        def lookup(self, names: list[str], slots: Sequence[int]) -> Match:
            asked.append(slots)
            return owner.view.lookup(names, slots)

    monkeypatch.setattr(owner.backup._copies, "_peers", Asked())
    owner.rank.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    for chain, moved in ((keys(1, 2), keys(1, 2)), (keys(1, 2, 3), keys(3)), (keys(1, 2, 3), [])):
        owner.backup.offer(chain)
        assert [key for landed in owner.wait_landed() for key in landed.keys] == moved
    assert asked == [[0]] * 3, "the pool"


def test_offer_when_pages_leave_the_pool_between_lookup_and_lease_then_dropped_and_counted(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving:
        lookup = hosts[0].view.lookup

        def lease(self, found: object, keys: list[str]) -> None:
            return None

    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    owner.backup.offer(keys(1, 2))
    monkeypatch.setattr(owner.backup._copies, "_peers", Leaving())
    assert not owner.wait_landed()
    assert owner.counters.backups_dropped_pages == 2 and owner.residency.num_filling == 0


def test_quiesce_when_copies_are_on_their_way_then_their_frames_are_free(hosts: list[Host]) -> None:
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3, 4), keys(1, 2))
    owner.backup.offer(keys(1, 2))
    owner.backup.quiesce()
    assert owner.residency.num_filling == 0 and owner.residency.num_resident == 0
