# SPDX-License-Identifier: Apache-2.0
"""A part of the arena whose owner is killed at any moment: what is adopted is what was stored."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from test.unit.arena.test_residency import FakeFrameTable

from banyan.arena.index_file import Entry, IndexFile
from banyan.arena.persistence import Persistence, gaps, latest, verified
from banyan.arena.residency import Residency
from banyan.telemetry import Counters

NAMESPACE = b"n" * 32
PAGE_BYTES = 8


def key(number: int) -> str:
    return f"{number:064x}"


def content(key: str) -> bytes:
    return key[-PAGE_BYTES:].encode()


class Later(Executor):
    """Computes when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[list[int]], tuple]] = []

    def submit(self, function, *args):  # type: ignore[no-untyped-def, override]
        future: Future[list[int]] = Future()
        self.jobs.append((future, (function, *args)))
        return future

    def work(self) -> None:
        for future, (function, *args) in self.jobs:
            future.set_result(function(*args))
        self.jobs.clear()


class Part:
    """Frames and index file in plain memory, as a killed owner leaves them."""

    def __init__(self, num_frames: int, *, frames: bytes = b"", index_file: bytes = b"") -> None:
        self.num_frames = num_frames
        self.frames = bytearray(frames or num_frames * PAGE_BYTES)
        self.index_file = bytearray(index_file or IndexFile.num_bytes(num_frames))

    def checksums(self, frames: Sequence[int], keys: Sequence[str]) -> list[int]:
        return [zlib.crc32(self.page(frame), int(key, 16)) for frame, key in zip(frames, keys, strict=True)]

    def page(self, frame: int) -> bytes:
        return bytes(self.frames[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES])

    def write(self, frame: int, data: bytes) -> None:
        self.frames[frame * PAGE_BYTES : frame * PAGE_BYTES + len(data)] = data

    def killed(self) -> Part:
        return Part(self.num_frames, frames=bytes(self.frames), index_file=bytes(self.index_file))

    def entries(self) -> list[Entry]:
        index_file = IndexFile(memoryview(self.index_file), page_bytes=PAGE_BYTES, num_frames=self.num_frames)
        return index_file.entries(NAMESPACE)


class Owner:
    def __init__(self, part: Part, *, max_pages: int = 100) -> None:
        self.part = part
        self.later = Later()
        self.frame_table = FakeFrameTable()
        self.residency = Residency(self.frame_table, part.num_frames)
        self.counters = Counters()
        index_file = IndexFile(memoryview(part.index_file), page_bytes=PAGE_BYTES, num_frames=part.num_frames)
        entries = index_file.entries(NAMESPACE)
        self.residency.adopt([entry.frame for entry in entries], [entry.key for entry in entries])
        self.persistence = Persistence(
            index_file=index_file,
            residency=self.residency,
            checksums=part.checksums,
            executor=self.later,
            max_pages=max_pages,
            counters=self.counters,
        )
        self.residency.watch(self.persistence)

    def fill(self, *numbers: int) -> None:
        frames = self.residency.claim(len(numbers))
        keys = [key(number) for number in numbers[: len(frames)]]
        for frame, name in zip(frames, keys, strict=True):
            self.part.write(frame, content(name))
        self.residency.publish(frames, keys)

    def keep(self) -> None:
        self.later.work()
        self.persistence.poll()


def kept(part: Part) -> set[str]:
    return {entry.key for entry in part.entries()}


def test_page_when_its_checksum_is_known_then_a_successor_finds_it() -> None:
    owner = Owner(Part(4))
    owner.fill(1, 2)
    assert kept(owner.part.killed()) == set()
    owner.keep()
    assert kept(owner.part.killed()) == {key(1), key(2)}
    assert owner.counters.kept_pages == 2


def test_frame_when_its_checksum_is_computed_then_it_is_not_filled_anew() -> None:
    owner = Owner(Part(2))
    owner.fill(1, 2)
    assert owner.residency.claim(2) == []
    owner.keep()
    assert len(owner.residency.claim(2)) == 2
    assert kept(owner.part.killed()) == set(), "whoever fills a frame has struck its entry"


def test_pages_when_their_checksums_cannot_be_computed_then_they_are_not_kept_and_their_frames_are_free() -> None:
    owner = Owner(Part(2))
    owner.fill(1, 2)
    failed: Future[list[int]] = Future()
    failed.set_exception(ZeroDivisionError())
    (waiting,) = owner.persistence._summing
    owner.persistence._summing[0] = replace(waiting, checksums=failed)
    owner.persistence.poll()
    assert kept(owner.part.killed()) == set() and len(owner.residency.claim(2)) == 2
    assert (owner.counters.kept_pages, owner.counters.unkept_pages) == (0, 2)


def test_pages_when_too_many_wait_then_the_end_of_the_prefix_is_not_kept() -> None:
    owner = Owner(Part(4), max_pages=2)
    owner.fill(1, 2, 3)
    owner.keep()
    assert kept(owner.part) == {key(1), key(2)}
    assert (owner.counters.kept_pages, owner.counters.unkept_pages) == (2, 1)


def test_flush_when_everything_is_forgotten_then_a_successor_finds_nothing() -> None:
    owner = Owner(Part(4))
    owner.fill(1, 2)
    owner.keep()
    owner.residency.reset()
    assert kept(owner.part.killed()) == set()


def test_successor_when_it_needs_room_then_the_end_of_the_prefix_goes_first() -> None:
    owner = Owner(Part(3))
    owner.fill(1, 2, 3)
    owner.keep()
    successor = Owner(owner.part.killed())
    assert set(successor.frame_table.key_of.values()) == {key(1), key(2), key(3)}
    successor.fill(4, 5)
    assert set(successor.frame_table.key_of.values()) == {key(1), key(4), key(5)}


def test_close_when_checksums_are_under_way_then_they_are_entered_first() -> None:
    part = Part(2)
    owner = Owner(part)
    owner.persistence._executor = ThreadPoolExecutor(1)
    owner.fill(1, 2)
    owner.persistence.close()
    assert kept(part) == {key(1), key(2)}


def test_verified_when_a_page_is_damaged_then_all_but_that_one() -> None:
    owner = Owner(Part(200), max_pages=200)
    owner.fill(*range(200))
    owner.keep()
    part = owner.part.killed()
    (bad,) = (entry for entry in part.entries() if entry.key == key(77))
    part.write(bad.frame, b"!")
    with ThreadPoolExecutor(2) as executor:
        good = verified(part.entries(), part.checksums, executor)
    assert {entry.key for entry in good} == {key(number) for number in range(200)} - {key(77)}


def test_latest_when_a_page_has_two_entries_then_the_later_one() -> None:
    entries = [Entry(0, key(1), 5), Entry(1, key(2), 6), Entry(2, key(1), 5)]
    assert latest(entries) == entries[1:]


@pytest.mark.parametrize(
    ("frames", "runs"),
    [([], [range(5)]), ([0, 4], [range(1, 4)]), ([2], [range(2), range(3, 5)]), (range(5), [])],
)
def test_gaps_when_frames_are_kept_then_the_runs_between_them(frames: Sequence[int], runs: list[range]) -> None:
    assert gaps(frames, 5) == runs


@pytest.mark.parametrize("seed", range(30))
def test_part_when_its_owner_is_killed_at_any_moment_then_what_is_adopted_is_what_was_stored(seed: int) -> None:
    rng = random.Random(seed)
    part = Part(10)
    num_adopted = 0
    for _ in range(12):
        owner = Owner(part, max_pages=rng.choice([2, 100]))
        num_adopted += len(owner.frame_table.key_of)
        filling: list[tuple[int, str]] = []
        for _ in range(rng.randrange(60)):
            match rng.randrange(6):
                case 0 | 1:
                    for frame in owner.residency.claim(rng.randrange(1, 4)):
                        name = key(rng.randrange(10**9, 10**9 + 30))
                        # A transfer under way: some of the bytes are there.
                        part.write(frame, content(name)[: rng.randrange(PAGE_BYTES)])
                        filling.append((frame, name))
                case 2 | 3 if filling:
                    frame, name = filling.pop()
                    part.write(frame, content(name))
                    owner.residency.publish([frame], [name])
                case 4:
                    owner.keep()
                case 5 if rng.random() < 0.1 and not filling:
                    owner.keep()
                    owner.residency.reset()
        part = part.killed()
        for entry in part.entries():
            assert part.page(entry.frame) == content(entry.key)
            assert part.checksums([entry.frame], [entry.key]) == [entry.checksum]
        # As the next owner does, who also meets frames that were evicted and filled with the same page again.
        keep = {entry.frame for entry in latest(part.entries())}
        index_file = IndexFile(memoryview(part.index_file), page_bytes=PAGE_BYTES, num_frames=10)
        index_file.strike([entry.frame for entry in part.entries() if entry.frame not in keep])
    assert num_adopted > 0
