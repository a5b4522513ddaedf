# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.arena.index_file import ENTRY, HEADER_BYTES, ORDER, Entry, IndexFile

OURS, OTHER = b"o" * 32, b"x" * 32


def key(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def memory() -> bytearray:
    return bytearray(IndexFile.num_bytes(4))


def opened(memory: bytearray, *, page_bytes: int = 512) -> IndexFile:
    return IndexFile(memoryview(memory), page_bytes=page_bytes, num_frames=4)


def test_entries_when_entered_then_the_next_owner_finds_them_in_that_order(memory: bytearray) -> None:
    index_file = opened(memory)
    assert index_file.entries(OURS) == []
    index_file.enter([3, 0], [key(1), key(2)], [11, 12])
    index_file.enter([2], [key(3)], [13])
    index_file.strike([0])
    assert opened(memory).entries(OURS) == [Entry(3, key(1), 11), Entry(2, key(3), 13)]


def test_entries_when_a_successor_enters_more_then_those_come_last(memory: bytearray) -> None:
    first = opened(memory)
    first.entries(OURS)
    first.enter([3], [key(1)], [11])
    second = opened(memory)
    second.entries(OURS)
    second.enter([0], [key(2)], [12])
    assert [entry.frame for entry in opened(memory).entries(OURS)] == [3, 0]


def test_entries_when_an_order_is_damaged_then_that_page_is_none_and_the_next_is_entered(memory: bytearray) -> None:
    first = opened(memory)
    first.entries(OURS)
    first.enter([3, 1], [key(1), key(2)], [11, 12])
    ORDER.pack_into(memory, HEADER_BYTES + ENTRY.size, 2**64 - 1)
    second = opened(memory)
    assert [entry.frame for entry in second.entries(OURS)] == [3]
    second.enter([0], [key(3)], [13])
    assert [entry.frame for entry in opened(memory).entries(OURS)] == [3, 0]


def test_entries_when_of_another_namespace_then_struck_for_good(memory: bytearray) -> None:
    index_file = opened(memory)
    index_file.entries(OURS)
    index_file.enter([1], [key(1)], [11])
    assert opened(memory).entries(OTHER) == []
    assert opened(memory).entries(OURS) == []


def test_entries_when_pages_have_another_size_then_struck(memory: bytearray) -> None:
    index_file = opened(memory)
    index_file.entries(OURS)
    index_file.enter([1], [key(1)], [11])
    assert opened(memory, page_bytes=1024).entries(OURS) == []


def test_entry_when_its_writer_is_killed_before_the_last_word_then_struck(memory: bytearray) -> None:
    index_file = opened(memory)
    index_file.entries(OURS)
    index_file.enter([1], [key(1)], [11])
    ORDER.pack_into(memory, HEADER_BYTES + ENTRY.size, 0)
    assert opened(memory).entries(OURS) == []


@pytest.mark.parametrize("frame", [-1, 4])
def test_frame_when_it_is_not_of_this_part_then_refused(memory: bytearray, frame: int) -> None:
    with pytest.raises(IndexError):
        opened(memory).strike([frame])
