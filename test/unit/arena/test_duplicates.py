# SPDX-License-Identifier: Apache-2.0
"""Which pages of the arena lie elsewhere on the node, over the real native core: two ranks; one part is full."""

from __future__ import annotations

import pytest
from test.unit.arena.test_backup import Host
from test.unit.cache_rig import LAYOUT
from test.unit.directory.rig import frames, keys

from banyan._native import RankTable
from banyan.arena import duplicates


@pytest.fixture
def hosts() -> list[Host]:
    """The first one's part holds 7, 8 and 9, which no pool has."""
    rank_table = RankTable.create(2 * LAYOUT.num_ranks)
    hosts = [Host(rank_table, slot, num_frames=3) for slot in range(LAYOUT.num_ranks)]
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(0, 1, 2), keys(7, 8, 9))
    owner.backup.offer(keys(7, 8, 9))
    owner.wait_landed()
    owner.rank.frame_table.retire(frames(0, 1, 2))
    owner.backup.write_back.begin()
    return hosts


def after_a_round(owner: Host) -> Host:
    """From now on only pages that are marked are looked up."""
    owner.backup.write_back._duplicates.go_first(1)
    return owner


def left_for(owner: Host, number: int) -> set[str]:
    """The pages that the arena gives up for one that leaves the pool."""
    before = set(owner.residency.keys)
    owner.rank.frame_table.publish(frames(10), keys(number))
    assert owner.backup.write_back.leaving(keys(number))
    owner.backup.write_back.send()
    owner.wait_landed()
    owner.rank.frame_table.retire(frames(10))
    return before - set(owner.residency.keys)


def test_page_when_no_pool_holds_one_of_the_arena_then_the_end_of_a_prefix_goes(hosts: list[Host]) -> None:
    assert left_for(hosts[0], 1) == set(keys(9))


def test_page_when_another_rank_has_loaded_it_then_it_goes_first_though_it_is_marked(hosts: list[Host]) -> None:
    owner, other = hosts
    after_a_round(owner)
    other.fetch(keys(7), frames(3))
    other.rank.frame_table.publish(frames(3), keys(7))
    assert left_for(owner, 1) == set(keys(7))
    assert owner.backup.write_back.has_room


def test_page_when_its_load_was_under_way_at_the_first_look_then_it_is_found_by_the_next(hosts: list[Host]) -> None:
    owner, other = hosts
    after_a_round(owner)
    other.fetch(keys(7), frames(3))
    after_a_round(owner)
    other.rank.frame_table.publish(frames(3), keys(7))
    assert left_for(owner, 1) == set(keys(7))


def test_page_when_it_was_in_the_pool_before_write_back_began_then_the_first_round_finds_it(hosts: list[Host]) -> None:
    hosts[0].rank.frame_table.publish(frames(0), keys(7))
    assert left_for(hosts[0], 1) == set(keys(7))


def test_page_when_it_came_down_because_a_frame_was_free_then_it_goes_before_what_nobody_else_has(
    hosts: list[Host],
) -> None:
    owner = after_a_round(hosts[0])
    owner.residency.demote(keys(9))
    owner.residency.abandon(owner.residency.claim(1))
    owner.rank.frame_table.publish(frames(3), keys(6))
    owner.backup.offer(keys(6))
    owner.wait_landed()
    assert left_for(owner, 1) == set(keys(6)), "the pool holds it"


def test_page_when_it_is_marked_and_in_no_pool_then_it_gets_another_round(hosts: list[Host]) -> None:
    owner, other = hosts
    other.fetch(keys(7, 8, 9), frames(3, 4, 5))
    after_a_round(owner)
    assert left_for(owner, 1) == set(keys(9)), "all are marked"
    owner.view.touch(owner.view.lookup(keys(7, 8)))
    after_a_round(owner)
    assert left_for(owner, 2) == set(keys(1)), "the others are marked"


def test_page_when_it_leaves_the_pool_which_shows_it_still_then_it_is_no_duplicate(hosts: list[Host]) -> None:
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(3), keys(7))
    assert owner.backup.write_back.leaving(keys(7))
    owner.rank.frame_table.publish(frames(10), keys(1))
    assert owner.backup.write_back.leaving(keys(1))
    assert set(owner.residency.keys) == set(keys(7, 8))
    owner.backup.write_back.send()
    owner.wait_landed()
    owner.rank.frame_table.retire(frames(10))
    assert left_for(owner, 2) == set(keys(7)), "SGLang kept it in the pool after all"


def test_look_when_the_arena_is_large_then_so_many_frames_for_a_page_and_the_next_look_goes_on(
    monkeypatch: pytest.MonkeyPatch, hosts: list[Host]
) -> None:
    monkeypatch.setattr(duplicates, "LOOKS_PER_PAGE", 1)
    owner = hosts[0]
    owner.rank.frame_table.publish(frames(0, 1, 2), keys(7, 8, 9))
    gone = [left_for(owner, number) for number in (1, 2)]
    assert gone == [set(keys(key)) for key in (7, 8)]
