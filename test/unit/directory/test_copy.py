# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest

from banyan._native import Lease, RankTable

from .rig import NUM_FRAMES, NUM_LAYERS, PAGE_BYTES, Rank, frames, ids, keys

ALL_LAYERS_BYTES = 2 * NUM_LAYERS * PAGE_BYTES


@pytest.fixture
def ranks() -> list[Rank]:
    rank_table = RankTable.create(3)
    ranks = [Rank(rank_table, slot) for slot in range(3)]
    ranks[0].frame_table.publish(frames(2, 3, 9, 5), keys(0, 1, 2, 3))
    ranks[1].frame_table.publish(frames(7, 8), keys(4, 5))
    return ranks


def leased(rank: Rank, *numbers: int) -> Lease:
    lease = rank.peers.lease(rank.peers.lookup(keys(*numbers)), keys(*numbers))
    assert lease is not None
    return lease


def test_copy_when_pages_are_scattered_over_peers_then_every_layer_is_equal(ranks: list[Rank]) -> None:
    reader = ranks[2]
    lease = leased(reader, 0, 1, 2, 3, 4, 5)
    copy = reader.peers.start_copy([(lease, frames(10, 11, 0, 15, 1, 4))])
    for layer in range(NUM_LAYERS):
        assert copy.wait_layer(layer) >= 0.0
        assert reader.page(10, layer) == ranks[0].page(2, layer)
    assert copy.finish()
    for source, frame, target in [(0, 2, 10), (0, 3, 11), (0, 9, 0), (0, 5, 15), (1, 7, 1), (1, 8, 4)]:
        assert reader.pages(target) == ranks[source].pages(frame)
    assert copy.bytes_fetched == copy.bytes_copied == 6 * ALL_LAYERS_BYTES
    assert copy.copy_s > 0.0


def test_copy_when_two_loads_want_one_page_then_fetched_once(ranks: list[Rank]) -> None:
    reader = ranks[2]
    copy = reader.peers.start_copy([(leased(reader, 0, 1), frames(10, 11)), (leased(reader, 0, 2), frames(12, 13))])
    assert copy.finish()
    assert reader.pages(10) == reader.pages(12) == ranks[0].pages(2)
    assert reader.pages(13) == ranks[0].pages(9)
    assert copy.bytes_fetched == 3 * ALL_LAYERS_BYTES
    assert copy.bytes_copied == 4 * ALL_LAYERS_BYTES


def test_copy_when_it_has_ended_then_its_leases_have_though_nobody_calls_finish(ranks: list[Rank]) -> None:
    owner, reader = ranks[0], ranks[2]
    lease = leased(reader, 0)
    copy = reader.peers.start_copy([(lease, frames(1))])
    copy.wait_layer(NUM_LAYERS - 1)
    while not copy.has_ended:
        pass
    assert ids(owner.frame_table.retire(frames(2))) == [2]
    assert copy.finish()
    assert copy.finish()


def test_start_copy_when_called_then_the_lease_is_the_copys_alone(ranks: list[Rank]) -> None:
    reader = ranks[2]
    lease = leased(reader, 0)
    copy = reader.peers.start_copy([(lease, frames(1))])
    lease.release()
    assert copy.finish() and reader.pages(1) == ranks[0].pages(2)
    with pytest.raises(ValueError, match="released before"):
        reader.peers.start_copy([(lease, frames(3))])


def test_copy_when_dropped_before_finish_then_its_leases_have_ended(ranks: list[Rank]) -> None:
    owner, reader = ranks[0], ranks[2]
    lease = leased(reader, 0)
    del_me = reader.peers.start_copy([(lease, frames(1))])
    del del_me
    assert ids(owner.frame_table.retire(frames(2))) == [2]
    lease.release()


def test_copy_when_nothing_is_loaded_then_lands(ranks: list[Rank]) -> None:
    copy = ranks[2].peers.start_copy([])
    assert copy.finish()
    assert copy.bytes_copied == 0


def test_copy_when_its_peers_object_is_gone_then_still_lands(ranks: list[Rank]) -> None:
    reader = ranks[2]
    copy = reader.peers.start_copy([(leased(reader, 0), frames(1))])
    del reader.peers
    assert copy.finish()
    assert reader.pages(1) == ranks[0].pages(2)


def test_start_copy_when_the_lease_was_released_then_valueerror(ranks: list[Rank]) -> None:
    lease = leased(ranks[2], 0)
    lease.release()
    with pytest.raises(ValueError, match="released before"):
        ranks[2].peers.start_copy([(lease, frames(1))])


def test_start_copy_when_the_lease_is_of_another_reader_then_valueerror(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="another Peers"):
        ranks[1].peers.start_copy([(leased(ranks[2], 0), frames(1))])


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ((1,), "1 frames for a lease of 2 pages"),
        ((1, NUM_FRAMES), f"frame {NUM_FRAMES} is outside the own pool of {NUM_FRAMES} pages"),
        ((1, 1), "frame 1 is named twice as a target"),
        ((1, -1), "frame -1 is no frame number"),
    ],
)
def test_start_copy_when_targets_cannot_be_right_then_valueerror(ranks: list[Rank], targets, reason: str) -> None:
    reader = ranks[2]
    with pytest.raises(ValueError, match=reason):
        reader.peers.start_copy([(leased(reader, 0, 1), frames(*targets))])
    assert ids(ranks[0].frame_table.retire(frames(2))) == [2], "the dropped lease pins nothing"


def test_wait_layer_when_out_of_range_then_valueerror(ranks: list[Rank]) -> None:
    copy = ranks[2].peers.start_copy([])
    with pytest.raises(ValueError, match=f"layer {NUM_LAYERS} of a copy of {NUM_LAYERS} layers"):
        copy.wait_layer(NUM_LAYERS)
