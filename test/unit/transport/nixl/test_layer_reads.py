# SPDX-License-Identifier: Apache-2.0
"""What one pull reads, where to, and how much of it at once."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from banyan.transport.nixl import layer_reads
from banyan.transport.nixl.layer_reads import CHUNK_BYTES, WINDOW_BYTES, Reading

BASE, THERE = 1 << 30, 1 << 40


class Reads:
    """Done when it is said."""

    def __init__(self) -> None:
        self.begun: list[list[tuple[int, int, int]]] = []
        self.done: set[int] = set()

    def begin(self, peer: str, to: Any, from_: Any, /) -> int:
        assert peer == "there"
        self.begun.append([(int(a[0]), int(b[0]), int(a[1])) for a, b in zip(to, from_, strict=True)])
        return len(self.begun) - 1

    def is_done(self, handle: Any, /) -> bool:
        return handle in self.done

    def finish(self) -> None:
        self.done.update(range(len(self.begun)))


def made(offsets: list[int], layer_bytes: list[int]) -> Reading:
    places = array("Q", [THERE + 7 * offset for offset in offsets])
    return Reading("there", BASE, array("Q", offsets).tobytes(), places.tobytes(), layer_bytes)


def test_layers_when_they_are_read_then_each_lands_once_all_before_it_have() -> None:
    reads, one = Reads(), made([0, 4096, 12288], [100, 300])
    one.step(reads)
    one.step(reads)
    assert reads.begun == [
        [(BASE + at, THERE + 7 * at, 100) for at in (0, 4096, 12288)],
        [(BASE + at + 100, THERE + 7 * at + 100, 300) for at in (0, 4096, 12288)],
    ]
    reads.done = {1}
    one.step(reads)
    assert one.num_landed == 0, "the first one is still under way"
    reads.done = {0, 1}
    one.step(reads)
    assert one.num_landed == 2 and one.is_over


def test_layer_when_it_is_large_then_it_lands_with_the_last_of_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_reads, "CHUNK_BYTES", 200)
    reads, one = Reads(), made([0, 1000, 2000], [100])
    for _ in range(2):
        one.step(reads)
    assert [len(moves) for moves in reads.begun] == [2, 1]
    reads.done = {0}
    one.step(reads)
    assert (one.num_landed, one.num_done) == (0, 1), "half of it"
    reads.finish()
    one.step(reads)
    assert one.num_landed == 1


def test_layers_when_they_are_small_then_the_first_is_read_alone_and_the_others_together() -> None:
    reads, one = Reads(), made([0, 1 << 20], [12 << 10] * 12)
    reads.done = set(range(10))
    for _ in range(10):
        one.step(reads)
    pieces = [moves[0][2] >> 10 for moves in reads.begun]
    assert pieces == [12, 60, 60, 12] and one.num_landed == 12
    starts = [moves[0][0] - BASE for moves in reads.begun]
    assert starts == [0, 12 << 10, 72 << 10, 132 << 10]


def test_window_when_it_is_full_then_no_read_begins_until_one_is_done() -> None:
    reads, one = Reads(), made([0], [CHUNK_BYTES] * 20)
    for _ in range(30):
        one.step(reads)
    assert len(reads.begun) == WINDOW_BYTES // CHUNK_BYTES and not one.has_room
    reads.done = {0}
    one.step(reads)
    assert len(reads.begun) == WINDOW_BYTES // CHUNK_BYTES + 1


def test_page_when_it_is_larger_than_the_window_then_it_is_read_alone() -> None:
    reads, one = Reads(), made([0], [2 * WINDOW_BYTES] * 2)
    for _ in range(3):
        one.step(reads)
    assert len(reads.begun) == 1
    reads.finish()
    one.step(reads)
    assert len(reads.begun) == 2


def test_pull_when_it_is_stopped_then_it_is_over_once_nothing_is_under_way() -> None:
    reads, one = Reads(), made([0], [CHUNK_BYTES] * 3)
    one.step(reads)
    one.stop()
    one.step(reads)
    assert len(reads.begun) == 1 and not one.is_over
    reads.finish()
    one.step(reads)
    assert one.is_over and one.num_landed == 1


def test_read_when_nixl_errs_then_it_is_said_at_once() -> None:
    class Erring(Reads):
        def is_done(self, handle: Any, /) -> bool:
            raise OSError("a read ended as ERR")

    reads, one = Erring(), made([0], [100])
    one.step(reads)
    with pytest.raises(OSError, match="ERR"):
        one.step(reads)
