# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from banyan._native import FrameTable, Peers, RankTable, SharedBytes

from .rig import NAMESPACE, NUM_FRAMES, PAGE_BYTES, Rank, frames, geometry, ids, key, keys


@pytest.fixture
def ranks() -> list[Rank]:
    rank_table = RankTable.create(2)
    return [Rank(rank_table, 0), Rank(rank_table, 1)]


@pytest.mark.parametrize(
    ("shape", "num_frames", "reason"),
    [
        (geometry(), NUM_FRAMES + 1, f"{NUM_FRAMES + 1} frames, but the geometry has room for {NUM_FRAMES}"),
        (geometry(), 0, "0 frames"),
        ([], 1, "0 layers"),
        ([[]], 1, "without extents"),
        ([[(0, 0)]], 1, "pages of 0 bytes"),
        ([[(1 << 40, 8)]], 1, "begins behind the pool"),
        ([[(0, 64), (0, 64)]], 1, "room for 0 pages"),
    ],
)
def test_frame_table_when_the_geometry_does_not_fit_then_valueerror(shape, num_frames: int, reason: str) -> None:
    pool = SharedBytes.create(6 * NUM_FRAMES * PAGE_BYTES, "pool")
    rank_table = RankTable.create(1)
    with pytest.raises(ValueError, match=reason):
        FrameTable(rank_table, 0, NAMESPACE, pool, num_frames, shape)
    FrameTable(
        rank_table, 0, NAMESPACE, pool, NUM_FRAMES, geometry()
    )  # The refused one left no trace in the rank table.


def test_frame_table_when_the_namespace_is_short_then_valueerror() -> None:
    pool = SharedBytes.create(4096, "pool")
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        FrameTable(RankTable.create(1), 0, b"abc", pool, 1, [[(0, 64)]])


@pytest.mark.parametrize(
    "wrong",
    [
        [1, 2],
        np.array([1, 2], dtype=np.int32),
        np.arange(8, dtype=np.int64)[::2],
        np.zeros((2, 1), dtype=np.int64),
        b"12345678",
    ],
)
def test_frames_when_no_flat_int64_buffer_then_valueerror(ranks: list[Rank], wrong) -> None:
    with pytest.raises(ValueError, match="C-contiguous buffer of int64"):
        ranks[0].frame_table.publish(wrong, keys(1, 2))


@pytest.mark.parametrize("wrong", ["", "0" * 63, "g" * 64, "0" * 65, "é" * 32, 7])
def test_keys_when_no_64_hex_digits_then_valueerror_names_the_position(ranks: list[Rank], wrong) -> None:
    with pytest.raises(ValueError, match="key 1"):
        ranks[0].frame_table.publish(frames(1, 2), [key(1), wrong])
    assert ranks[0].frame_table.num_published == 0


@pytest.mark.parametrize("frame", [-1, NUM_FRAMES, 1 << 40])
def test_frames_when_out_of_range_then_valueerror_and_nothing_changes(ranks: list[Rank], frame: int) -> None:
    frame_table, version = ranks[0].frame_table, ranks[1].peers.version()
    with pytest.raises(ValueError, match=f"frame {frame} is outside the frame table of {NUM_FRAMES} frames"):
        frame_table.publish(frames(0, frame), keys(1, 2))
    with pytest.raises(ValueError, match=f"frame {frame} is outside"):
        frame_table.retire(frames(0, frame))
    assert frame_table.num_published == 0 and ranks[1].peers.version() == version


def test_publish_when_lengths_differ_then_valueerror(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="2 frames but 1 keys"):
        ranks[0].frame_table.publish(frames(1, 2), keys(1))


def test_publish_when_repeated_then_no_change(ranks: list[Rank]) -> None:
    frame_table = ranks[0].frame_table
    assert frame_table.publish(frames(1, 2), keys(1, 2)) == 2
    version = ranks[1].peers.version()
    assert frame_table.publish(frames(1, 2), keys(1, 2)) == 0
    assert ranks[1].peers.version() == version


def test_publish_when_the_frame_has_another_key_then_valueerror(ranks: list[Rank]) -> None:
    ranks[0].frame_table.publish(frames(1), keys(1))
    with pytest.raises(ValueError, match="frame 1 is already published under another key"):
        ranks[0].frame_table.publish(frames(0, 1), keys(0, 2))
    assert ranks[0].frame_table.num_published == 1


def test_publish_when_one_call_gives_a_frame_two_keys_then_valueerror(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="frame 1 is already published under another key"):
        ranks[0].frame_table.publish(frames(1, 1), keys(1, 2))
    assert ranks[0].frame_table.num_published == 0


def test_publish_when_another_frame_has_the_key_then_the_first_stays(ranks: list[Rank]) -> None:
    owner, reader = ranks
    owner.frame_table.publish(frames(1), keys(1))
    assert owner.frame_table.publish(frames(2), keys(1)) == 0
    assert ids(owner.frame_table.retire(frames(1))) == [1]
    assert reader.peers.lookup(keys(1)).num_pages == 0


def test_publish_when_the_frame_is_in_quarantine_then_valueerror(ranks: list[Rank]) -> None:
    owner, reader = ranks
    owner.frame_table.publish(frames(1), keys(1))
    lease = reader.peers.lease(reader.peers.lookup(keys(1)), keys(1))
    assert ids(owner.frame_table.retire(frames(1))) == []
    with pytest.raises(ValueError, match="frame 1 is in quarantine"):
        owner.frame_table.publish(frames(1), keys(2))
    lease.release()
    assert ids(owner.frame_table.drain()) == [1]
    assert owner.frame_table.publish(frames(1), keys(2)) == 1


def test_retire_when_never_published_then_returned(ranks: list[Rank]) -> None:
    assert ids(ranks[0].frame_table.retire(frames(3, 5))) == [3, 5]


def test_retire_when_a_frame_is_named_twice_then_valueerror(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="frame 3 is named twice"):
        ranks[0].frame_table.retire(frames(3, 3))


def test_retire_when_already_in_quarantine_then_returned_once_by_drain(ranks: list[Rank]) -> None:
    owner, reader = ranks
    owner.frame_table.publish(frames(1, 2), keys(1, 2))
    lease = reader.peers.lease(reader.peers.lookup(keys(1)), keys(1))
    owner.frame_table.reset()
    assert (owner.frame_table.num_published, owner.frame_table.num_quarantined) == (0, 1)
    assert ids(owner.frame_table.retire(frames(1, 2))) == [2]
    assert ids(owner.frame_table.drain()) == []
    lease.release()
    assert ids(owner.frame_table.drain()) == [1]
    assert ids(owner.frame_table.drain()) == []


@contextmanager
def no_file_more() -> Iterator[None]:
    """This process can open none meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_peer_when_no_file_could_be_opened_as_it_came_then_its_pages_are_found_a_moment_later() -> None:
    rank_table = RankTable.create(2)
    reader, owner = Rank(rank_table, 0), Rank(rank_table, 1)
    owner.frame_table.publish(frames(1), keys(1))
    with no_file_more():
        assert reader.peers.lookup(keys(1)).num_pages == 0
    deadline_s = time.monotonic() + 5
    while reader.peers.lookup(keys(1)).num_pages == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_drain_when_no_file_can_be_opened_then_no_reader_is_taken_for_dead(ranks: list[Rank]) -> None:
    owner, reader = ranks
    owner.frame_table.publish(frames(1), keys(1))
    lease = reader.peers.lease(reader.peers.lookup(keys(1)), keys(1))
    assert ids(owner.frame_table.retire(frames(1))) == []
    time.sleep(0.15)  # Longer than it is believed that somebody is alive.
    with no_file_more():
        drained = ids(owner.frame_table.drain())
    assert drained == [] and ids(owner.frame_table.drain()) == []
    lease.release()
    assert ids(owner.frame_table.drain()) == [1]


def test_close_when_repeated_then_harmless_and_nothing_is_published_any_more(ranks: list[Rank]) -> None:
    owner, reader = ranks
    owner.frame_table.publish(frames(1), keys(1))
    owner.frame_table.close()
    owner.frame_table.close()
    assert reader.peers.lookup(keys(1)).num_pages == 0
    owner.frame_table.reset()
    with pytest.raises(ValueError, match="the frame table of slot 0 is closed"):
        owner.frame_table.publish(frames(1), keys(1))


def test_close_when_a_peer_reads_then_its_owner_still_gets_the_frame_when_it_is_let_go(ranks: list[Rank]) -> None:
    owner, reader = ranks
    owner.frame_table.publish(frames(1, 2), keys(1, 2))
    lease = reader.peers.lease(reader.peers.lookup(keys(1)), keys(1))
    owner.frame_table.close()
    assert ids(owner.frame_table.retire(frames(1, 2, 3))) == [2, 3]
    assert ids(owner.frame_table.drain()) == []
    lease.release()
    assert ids(owner.frame_table.drain()) == [1]


def test_pages_when_their_keys_were_chosen_to_share_a_bucket_then_a_reader_finds_each() -> None:
    num_frames = 2000
    rank_table = RankTable.create(2)
    owner = Rank(rank_table, 0, num_frames)
    # The low bits, which whoever can try tokens can choose; the rest as it comes.
    chosen = ["0" * 16 + key(number)[16:] for number in range(num_frames)]
    assert owner.frame_table.publish(np.arange(num_frames, dtype=np.int64), chosen) == num_frames
    peers = Peers(rank_table, 1, 1, NAMESPACE, owner.geometry, None)
    assert sum(peers.lookup([one]).num_pages for one in chosen) == num_frames
