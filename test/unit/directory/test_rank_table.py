# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os

import pytest

from banyan._native import FrameTable, Peers, RankTable, SharedBytes

from .rig import NAMESPACE, NUM_FRAMES, Rank, frames, geometry, keys


@pytest.mark.parametrize("num_slots", [0, 65])
def test_create_when_the_number_of_slots_is_out_of_range_then_valueerror(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"not {num_slots}"):
        RankTable.create(num_slots)


def test_open_when_the_path_is_gone_then_file_not_found() -> None:
    with pytest.raises(FileNotFoundError, match="cannot open the rank table /proc/self/fd/9999"):
        RankTable.open("/proc/self/fd/9999")


def test_open_when_the_memory_is_no_rank_table_then_valueerror() -> None:
    shared = SharedBytes.create(4096, "impostor")
    with pytest.raises(ValueError, match=r"is no rank table: its magic is 0x0+$"):
        RankTable.open(_path_of("banyan-impostor"))
    del shared


def test_open_when_the_format_is_another_then_valueerror_names_both() -> None:
    rank_table = RankTable.create(2)
    with open(rank_table.path, "r+b") as table:
        table.seek(8)
        table.write((99).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="rank table format 99, this build reads format 2"):
        RankTable.open(rank_table.path)


def test_page_tokens_when_a_rank_says_another_number_then_it_is_refused_and_the_first_one_stands() -> None:
    rank_table = RankTable.create(2)
    assert rank_table.page_tokens == 0
    RankTable.open(rank_table.path).agree_on_page_tokens(64)
    rank_table.agree_on_page_tokens(64)
    with pytest.raises(ValueError, match="a page has 16 tokens here and 64 tokens at another rank"):
        rank_table.agree_on_page_tokens(16)
    assert rank_table.page_tokens == 64


def test_reading_when_a_rank_says_it_then_others_see_it_until_another_takes_the_member_slot() -> None:
    rank_table = RankTable.create(2)
    rank = Rank(rank_table, 1)
    rank_table.set_reading(1, 7)
    rank_table.set_read_rate(1, 50)
    seen = RankTable.open(rank_table.path)
    assert [(seen.reading(slot), seen.read_rate(slot)) for slot in (0, 1)] == [(0, 0), (7, 50)]
    rank.frame_table.close()
    assert (rank_table.reading(1), rank_table.read_rate(1)) == (0, 0)
    with pytest.raises(ValueError, match="slot 2 is outside"):
        rank_table.reading(2)


def test_open_when_a_plain_file_then_valueerror(tmp_path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="not sealed shared memory"):
        RankTable.open(str(path))


def test_members_when_a_rank_joins_and_leaves_then_listed_and_gone() -> None:
    rank_table = RankTable.create(4)
    rank = Rank(RankTable.open(rank_table.path), 2)
    rank.frame_table.publish(frames(0, 1), keys(0, 1))
    assert rank_table.members() == [
        {
            "slot": 2,
            "pid": os.getpid(),
            "alive": True,
            "namespace": NAMESPACE.hex(),
            "num_frames": NUM_FRAMES,
            "num_published": 2,
        }
    ]
    rank.frame_table.close()
    assert rank_table.members() == []


def test_frame_table_when_the_slot_is_taken_by_a_live_process_then_valueerror() -> None:
    rank_table = RankTable.create(1)
    rank = Rank(rank_table, 0)
    with pytest.raises(ValueError, match=f"slot 0 is in use by process {os.getpid()}"):
        FrameTable(rank_table, 0, NAMESPACE, rank.pool, NUM_FRAMES, geometry())


def test_peers_when_the_reader_bit_is_taken_then_valueerror_until_it_is_free() -> None:
    rank_table = RankTable.create(2)
    rank = Rank(rank_table, 0)
    with pytest.raises(ValueError, match="reader bit 0 is in use"):
        Peers(rank_table, 0, 0, NAMESPACE, geometry(), rank.pool)
    del rank.peers
    Peers(rank_table, 0, 0, NAMESPACE, geometry(), rank.pool)


def test_onlookers_when_many_then_they_need_no_bit_of_their_own() -> None:
    rank_table = RankTable.create(2)
    rank = Rank(rank_table, 0)
    rank.frame_table.publish(frames(3), keys(1))
    onlookers = [Peers(rank_table, None, 0, NAMESPACE, [], None) for _ in range(3)]
    assert [onlooker.prefix_lens(keys(1)) for onlooker in onlookers] == [[1, 0]] * 3
    with pytest.raises(ValueError, match="only a rank with a pool"):
        onlookers[0].lease(onlookers[0].lookup(keys(1)), keys(1))


def test_slot_when_outside_the_rank_table_then_valueerror() -> None:
    rank_table = RankTable.create(2)
    with pytest.raises(ValueError, match="slot 2 is outside the rank table of 2 slots"):
        Rank(rank_table, 2)
    with pytest.raises(ValueError, match="slot 5 is outside"):
        Peers(rank_table, 5, 0, NAMESPACE, [], None)


def _path_of(label: str) -> str:
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/{os.getpid()}/fd/{fd}"
        if os.path.exists(path) and label in os.readlink(path):
            return path
    raise AssertionError(f"no descriptor of {label}")
