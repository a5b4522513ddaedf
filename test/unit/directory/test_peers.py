# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest

from banyan._native import FrameTable, Peers, RankTable, SharedBytes

from .rig import NAMESPACE, NUM_FRAMES, PAGE_BYTES, Rank, frames, geometry, ids, keys


@pytest.fixture
def rank_table() -> RankTable:
    return RankTable.create(4)


@pytest.fixture
def ranks(rank_table: RankTable) -> list[Rank]:
    return [Rank(rank_table, slot) for slot in range(3)]


def test_lookup_when_nobody_has_the_first_page_then_empty(ranks: list[Rank]) -> None:
    ranks[1].frame_table.publish(frames(0), keys(1))
    found = ranks[0].peers.lookup(keys(0, 1))
    assert (found.num_pages, found.runs) == (0, [])
    assert ranks[0].peers.lookup([]).num_pages == 0


def test_lookup_when_only_the_own_frame_table_has_it_then_empty_but_counted(ranks: list[Rank]) -> None:
    ranks[0].frame_table.publish(frames(0), keys(0))
    assert ranks[0].peers.lookup(keys(0)).num_pages == 0
    assert ranks[0].peers.prefix_lens(keys(0)) == [1, 0, 0, 0]


def test_lookup_when_peers_hold_parts_then_the_longest_run_first_and_on(ranks: list[Rank]) -> None:
    ranks[1].frame_table.publish(frames(5), keys(0))
    ranks[2].frame_table.publish(frames(6, 7), keys(0, 1))
    ranks[1].frame_table.publish(frames(8, 9), keys(2, 3))
    found = ranks[0].peers.lookup(keys(0, 1, 2, 3, 4))
    assert (found.num_pages, found.runs) == (4, [(2, 2), (1, 2)])


def test_lookup_when_runs_are_equal_then_the_next_slot_is_the_source(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.frame_table.publish(frames(0), keys(0))
    assert [rank.peers.lookup(keys(0)).runs for rank in ranks] == [[(1, 1)], [(2, 1)], [(0, 1)]]


def test_holders_when_several_hold_a_page_then_the_first_of_the_slots_and_no_other_slot(ranks: list[Rank]) -> None:
    for rank in ranks[1:]:
        rank.frame_table.publish(frames(0), keys(0))
    peers = ranks[0].peers
    assert [peers.holders(keys(0), slots) for slots in ([2, 1], [0, 1], [0])] == [[2], [1], [None]]
    assert peers.holders(keys(1, 0), [1, 2, 3, 99]) == [None, 1]
    ranks[1].frame_table.retire(frames(0))
    assert peers.holders(keys(0), [1, 2]) == [2]


def test_lookup_when_the_namespace_differs_then_never_shared(rank_table: RankTable, ranks: list[Rank]) -> None:
    ranks[0].frame_table.publish(frames(0), keys(0))
    stranger = Peers(rank_table, 3, 3, b"m" * 32, geometry(), ranks[2].pool)
    assert stranger.lookup(keys(0)).num_pages == 0
    assert stranger.prefix_lens(keys(0)) == [0, 0, 0, 0]


def test_lookup_when_page_sizes_differ_then_never_shared(rank_table: RankTable, ranks: list[Rank]) -> None:
    ranks[0].frame_table.publish(frames(0), keys(0))
    other = Peers(rank_table, 3, 3, NAMESPACE, geometry(4, PAGE_BYTES * 2), ranks[2].pool)
    assert other.lookup(keys(0)).num_pages == 0


def test_lookup_when_page_sizes_differ_then_it_is_said_once_why_they_are_not_shared(
    rank_table: RankTable, ranks: list[Rank], capfd: pytest.CaptureFixture[str]
) -> None:
    other = Rank(rank_table, 3, page_bytes=2 * PAGE_BYTES)
    capfd.readouterr()
    for _ in range(3):
        assert ranks[0].peers.lookup(keys(1)).num_pages == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "banyan" in line and "member slot 3" in line and "another shape" in line
    del other


def test_lease_when_the_page_was_retired_since_then_none(ranks: list[Rank]) -> None:
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(0, 1), keys(0, 1))
    found = reader.peers.lookup(keys(0, 1))
    owner.frame_table.retire(frames(1))
    assert reader.peers.lease(found, keys(0, 1)) is None
    assert ids(owner.frame_table.retire(frames(0))) == [0], "a refused lease pins nothing"


def test_lease_when_the_page_was_published_again_since_then_none(ranks: list[Rank]) -> None:
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(0), keys(0))
    found = reader.peers.lookup(keys(0))
    owner.frame_table.retire(frames(0))
    owner.frame_table.publish(frames(0), keys(0))
    assert reader.peers.lease(found, keys(0)) is None


@pytest.mark.parametrize("others", [keys(0, 3), keys(3, 1), keys(0, 0), keys(1, 0), keys(1)])
def test_lease_when_other_pages_were_looked_up_then_none_and_nothing_is_pinned(ranks, others) -> None:
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(0, 1, 2), keys(0, 1, 2))
    found = reader.peers.lookup(keys(0, 1, 2))
    assert reader.peers.lease(found, others) is None
    assert reader.peers.lease(found, keys(0, 1)).num_pages == 2
    assert ids(owner.frame_table.retire(frames(0, 1, 2))) == [0, 1, 2]


def test_lease_when_more_pages_than_found_then_valueerror(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="3 pages wanted of a match of 0"):
        ranks[0].peers.lease(ranks[0].peers.lookup(keys(0)), keys(0, 1, 2))


def test_lease_when_the_match_is_of_another_reader_then_valueerror(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="another Peers"):
        ranks[0].peers.lease(ranks[1].peers.lookup([]), [])


def test_lease_when_held_twice_then_the_last_release_frees(ranks: list[Rank]) -> None:
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(4), keys(0))
    found = reader.peers.lookup(keys(0))
    first, second = reader.peers.lease(found, keys(0)), reader.peers.lease(found, keys(0))
    assert ids(owner.frame_table.retire(frames(4))) == []
    first.release()
    first.release()
    assert ids(owner.frame_table.drain()) == []
    second.release()
    assert ids(owner.frame_table.drain()) == [4]


def test_lease_when_dropped_then_released(ranks: list[Rank]) -> None:
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(4), keys(0))
    lease = reader.peers.lease(reader.peers.lookup(keys(0)), keys(0))
    assert (lease.num_pages, lease.runs) == (1, [(0, 1)])
    owner.frame_table.retire(frames(4))
    del lease
    assert ids(owner.frame_table.drain()) == [4]


def test_reader_bit_when_a_match_and_a_released_lease_are_kept_then_the_next_peers_object_has_it(rank_table, ranks):
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(4), keys(0))
    found = reader.peers.lookup(keys(0))
    lease = reader.peers.lease(found, keys(0))
    lease.release()
    del reader.peers
    successor = Peers(rank_table, 1, 1, NAMESPACE, reader.geometry, reader.pool)
    with pytest.raises(ValueError, match="another Peers"):
        successor.lease(found, keys(0))
    with pytest.raises(ValueError, match="another Peers"):
        successor.start_copy([(lease, frames(9))])


def test_lease_when_the_owner_leaves_then_its_pages_can_still_be_copied(
    rank_table: RankTable, ranks: list[Rank]
) -> None:
    owner, reader = ranks[:2]
    content = owner.pages(4)
    owner.frame_table.publish(frames(4), keys(0))
    found = reader.peers.lookup(keys(0))
    lease = reader.peers.lease(found, keys(0))
    owner.frame_table.close()
    assert reader.peers.lease(found, keys(0)) is None
    assert reader.peers.start_copy([(lease, frames(9))]).finish()
    assert reader.pages(9) == content


def test_slot_when_taken_again_then_the_new_frame_table_is_found(rank_table: RankTable, ranks: list[Rank]) -> None:
    owner, reader = ranks[:2]
    owner.frame_table.publish(frames(4), keys(0))
    lease = reader.peers.lease(reader.peers.lookup(keys(0)), keys(0))
    owner.frame_table.close()
    successor = FrameTable(rank_table, 0, NAMESPACE, owner.pool, NUM_FRAMES, geometry())
    successor.publish(frames(5), keys(0))
    found = reader.peers.lookup(keys(0))
    again = reader.peers.lease(found, keys(0))
    lease.release()
    assert ids(successor.retire(frames(5))) == []
    again.release()
    assert ids(successor.drain()) == [5]


def test_version_when_a_peer_publishes_retires_or_leaves_then_differs(ranks: list[Rank]) -> None:
    reader = ranks[1].peers
    seen = [reader.version()]
    assert reader.version() == seen[0]
    ranks[0].frame_table.publish(frames(1), keys(1))
    seen.append(reader.version())
    ranks[0].frame_table.retire(frames(1))
    seen.append(reader.version())
    ranks[0].frame_table.close()
    seen.append(reader.version())
    assert len(set(seen)) == 4


def test_pools_when_of_different_size_then_pages_are_exchanged(rank_table: RankTable) -> None:
    small, large = Rank(rank_table, 0, num_frames=4), Rank(rank_table, 1, num_frames=40)
    small.frame_table.publish(frames(3), keys(0))
    lease = large.peers.lease(large.peers.lookup(keys(0)), keys(0))
    assert large.peers.start_copy([(lease, frames(39))]).finish()
    assert large.pages(39) == small.pages(3)


def test_peers_when_the_pool_is_too_small_then_valueerror(rank_table: RankTable) -> None:
    pool = SharedBytes.create(64, "pool")
    with pytest.raises(ValueError, match="behind the pool of 64 bytes"):
        Peers(rank_table, 0, 0, NAMESPACE, geometry(), pool)
