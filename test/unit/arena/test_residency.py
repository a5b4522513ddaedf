# SPDX-License-Identifier: Apache-2.0
import random
from array import array

import pytest

from banyan.arena.residency import Residency, frame_ids


class FakeFrameTable:
    """Publishes, and quarantines what `pinned` names until it is taken out of there."""

    def __init__(self) -> None:
        self.key_of: dict[int, str] = {}
        self.touched: set[int] = set()
        self.pinned: set[int] = set()
        self.quarantine: set[int] = set()
        self.num_examined = self.num_looks = 0

    def publish(self, frames: array, keys: list[str]) -> int:
        for frame, key in zip(frames, keys, strict=True):
            assert frame not in self.key_of and frame not in self.quarantine
            assert key not in self.key_of.values()
            self.key_of[frame] = key
        return len(frames)

    def retire(self, frames: array) -> bytes:
        for frame in frames:
            del self.key_of[frame]
        self.quarantine |= self.pinned & set(frames)
        return array("q", [frame for frame in frames if frame not in self.pinned]).tobytes()

    def drain(self) -> bytes:
        free = self.quarantine - self.pinned
        self.quarantine -= free
        return array("q", sorted(free)).tobytes()

    def take_touched(self, frames: array) -> bytes:
        self.num_examined += len(frames)
        self.num_looks += 1
        asked = self.touched & set(frames)
        self.touched -= asked
        return array("q", sorted(asked)).tobytes()


class LargeFrameTable(FakeFrameTable):
    """Takes pages unseen: to compare each with all the others takes too long."""

    def publish(self, frames: array, keys: list[str]) -> int:
        self.key_of.update(zip(frames, keys, strict=True))
        return len(frames)


@pytest.fixture
def frame_table() -> FakeFrameTable:
    return FakeFrameTable()


def fill(residency: Residency, *keys: str) -> list[int]:
    frames = residency.claim(len(keys))
    residency.publish(frames, keys)
    return frames


def test_claim_when_all_is_free_then_every_frame_once(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 4)
    assert sorted(residency.claim(9)) == [0, 1, 2, 3]
    assert residency.num_filling == 4 and residency.claim(1) == []


def test_reset_when_frames_are_held_or_filled_then_free_once_they_are_let_go(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 4)
    held, pinned, other = fill(residency, "a"), fill(residency, "b"), fill(residency, "c")
    filling = residency.claim(1)
    residency.hold(held + pinned)
    frame_table.pinned.update(pinned)
    residency.reset()
    assert residency.num_resident == 0 and residency.claim(4) == other
    residency.abandon(other)
    frame_table.pinned.clear()
    assert residency.claim(4) == other, "out of quarantine, and still held"
    residency.abandon(other + filling)
    residency.unhold(held + pinned)
    assert sorted(residency.claim(4)) == [0, 1, 2, 3]


def test_page_when_its_frame_table_was_emptied_under_a_reader_then_its_frame_is_no_free_one(
    frame_table: FakeFrameTable,
) -> None:
    """Somebody withdraws all, and a reader stays longer than he is waited for: the page is resident here still."""
    residency = Residency(frame_table, 2)
    (frame,) = fill(residency, "a")
    frame_table.key_of.clear()
    frame_table.quarantine.add(frame)
    assert residency.claim(1) == [1 - frame]
    assert residency.frame("a") == frame


def test_evict_when_nothing_was_touched_then_the_end_of_the_prefix_goes_first(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 3)
    fill(residency, "root", "middle", "leaf")
    fill(residency, "x", "y")
    assert set(frame_table.key_of.values()) == {"root", "x", "y"}
    assert residency.num_evicted == 2


def test_evict_when_a_page_was_leased_then_it_gets_another_round(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 2)
    old, _new = fill(residency, "old"), fill(residency, "new")
    frame_table.touched.update(old)
    fill(residency, "x")
    assert set(frame_table.key_of.values()) == {"old", "x"}
    fill(residency, "y")
    assert "old" not in frame_table.key_of.values(), "a mark counts once"


def test_evict_when_all_are_touched_then_the_first_goes_in_the_second_round(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 2)
    frames = fill(residency, "a") + fill(residency, "b")
    frame_table.touched.update(frames)
    fill(residency, "x")
    assert set(frame_table.key_of.values()) == {"b", "x"}


def test_claim_when_the_rest_is_held_or_read_then_fewer(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 3)
    held, read, _ = (fill(residency, key)[0] for key in "abc")
    residency.hold([held])
    frame_table.pinned.add(read)
    assert len(residency.claim(3)) == 1
    frame_table.pinned.clear()
    assert residency.claim(3) == [read], "what a peer has read comes back"
    residency.unhold([held])
    assert residency.claim(3) == [held]


def test_publish_when_a_page_is_resident_already_then_its_frame_stays_and_the_new_one_is_free(
    frame_table: FakeFrameTable,
) -> None:
    residency = Residency(frame_table, 3)
    (first,) = fill(residency, "a")
    frames = residency.claim(2)
    residency.publish(frames, ["a", "b"])
    assert residency.frame("a") == first and residency.frame("b") == frames[1]
    assert residency.claim(1) == frames[:1]


def test_claim_when_the_part_has_grown_then_new_frames_come_before_an_eviction(frame_table: FakeFrameTable) -> None:
    residency = Residency(frame_table, 1)
    first = fill(residency, "a")
    residency.grow(2)
    assert fill(residency, "b", "c") == [1, 2] and first == [0]
    assert set(frame_table.key_of.values()) == {"a", "b", "c"} and residency.num_evicted == 0


@pytest.mark.parametrize("seed", range(20))
def test_frames_when_used_at_random_then_each_is_in_one_place(frame_table: FakeFrameTable, seed: int) -> None:
    rng = random.Random(seed)
    residency = Residency(frame_table, 12)
    filling: list[int] = []
    held: list[int] = []
    for step in range(400):
        match rng.randrange(6):
            case 0:
                filling += residency.claim(rng.randrange(5))
            case 1:
                rng.shuffle(filling)
                done = [filling.pop() for _ in range(rng.randrange(len(filling) + 1))]
                residency.publish(done, [f"{rng.randrange(30)}" for _ in done] if step % 2 else [f"s{f}" for f in done])
            case 2 if filling:
                residency.abandon([filling.pop()])
            case 3 if frame_table.key_of:
                frame = rng.choice(sorted(frame_table.key_of))
                residency.hold([frame])
                held.append(frame)
            case 4 if held:
                residency.unhold([held.pop()])
            case _:
                frame_table.pinned = {frame for frame in range(12) if rng.random() < 0.2}
                frame_table.touched |= {frame for frame in frame_table.key_of if rng.random() < 0.3}
        places = [*residency._free, *filling, *frame_table.key_of, *frame_table.quarantine]
        assert sorted(places) == list(range(12))
        assert set(held) <= set(frame_table.key_of), "a held frame stays"
        assert len(set(frame_table.key_of.values())) == len(frame_table.key_of)
    assert frame_ids(array("q", [3]).tobytes()) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_claim_when_somebody_asks_which_pages_are_wanted_then_the_same_ones_go(seed: int) -> None:
    tables = [FakeFrameTable() for _ in range(2)]
    asked, alone = (Residency(table, 12) for table in tables)
    rng, wanted = random.Random(seed), set[str]()
    for step in range(200):
        touched = {frame for frame in tables[0].key_of if rng.random() < 0.2}
        for table in tables:
            table.touched |= touched
        first = rng.randrange(12)
        wanted.update(asked.wanted_in(range(first, rng.randrange(first, 12))))
        keys = [f"{step} {number}" for number in range(rng.randrange(5))]
        frames = [residency.claim(len(keys)) for residency in (asked, alone)]
        assert frames[0] == frames[1] and asked.last_evicted == alone.last_evicted
        for residency in (asked, alone):
            residency.publish(frames[0], keys[: len(frames[0])])
        if rng.random() < 0.1:
            assert asked.demote(gone := asked.keys[:2]) == alone.demote(gone)
    assert wanted


class Told:
    """What a watch is told."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.num_emptied = 0

    def taken(self, frames) -> None:
        pass

    def filled(self, frames, keys) -> None:
        assert not self.present & set(keys)
        self.present |= set(keys)

    def evicted(self, keys) -> None:
        assert set(keys) <= self.present
        self.present -= set(keys)

    def emptied(self) -> None:
        assert not self.present
        self.num_emptied += 1


@pytest.mark.parametrize("seed", range(20))
def test_watch_when_pages_come_and_go_then_it_knows_which_are_there(frame_table: FakeFrameTable, seed: int) -> None:
    residency, told, rng = Residency(frame_table, 8), Told(), random.Random(seed)
    residency.watch(told)
    for _ in range(200):
        keys = [f"k{number}" for number in rng.sample(range(20), rng.randrange(1, 6))]
        frame_table.pinned = {frame for frame in range(8) if rng.random() < 0.2}
        frame_table.touched = {frame for frame in range(8) if rng.random() < 0.3}
        frames = residency.claim(len(keys))
        residency.publish(frames, keys[: len(frames)])
        if rng.random() < 0.05:
            residency.reset()
        assert told.present == set(residency.keys) == set(frame_table.key_of.values())
    residency.reset()
    assert told.num_emptied and residency.keys == []


def test_evict_when_pages_are_kept_then_they_outlive_ten_times_the_arena_and_go_once_they_are_not(
    frame_table: FakeFrameTable,
) -> None:
    kept = {"a", "b"}
    residency = Residency(frame_table, 4, kept)
    fill(residency, "a", "b")
    for number in range(40):
        fill(residency, f"scan {number}")
    assert kept < set(frame_table.key_of.values())
    kept.clear()
    residency.kept_no_more(["a", "b", "gone long ago"])
    fill(residency, "c", "d", "e", "f")
    assert not {"a", "b"} & set(frame_table.key_of.values())


def test_claims_when_all_is_kept_then_it_is_walked_past_once_and_not_by_each_of_them(
    frame_table: FakeFrameTable,
) -> None:
    keys = [f"pinned {number}" for number in range(50)]
    residency = Residency(frame_table, 50, set(keys))
    fill(residency, *keys)
    for number in range(20):
        fill(residency, f"scan {number}")
    assert frame_table.num_examined <= 50 + 3 * 20
    assert len(set(keys) & set(frame_table.key_of.values())) == 49


def test_claim_when_every_page_was_asked_for_again_then_their_marks_go_in_few_looks_and_one_page_leaves(
    frame_table: FakeFrameTable,
) -> None:
    residency = Residency(frame_table, 3000)
    frames = fill(residency, *(f"page {number}" for number in range(3000)))
    frame_table.touched = set(frames)
    fill(residency, "one more")
    assert frame_table.num_looks <= 30 and not frame_table.touched
    assert residency.num_evicted == 1 and residency.num_resident == 3000


def test_claim_when_more_pages_were_asked_for_than_it_passes_then_one_leaves_marked_and_the_held_ones_stay() -> None:
    frame_table = LargeFrameTable()
    residency = Residency(frame_table, 100_000)
    frames = fill(residency, *(f"page {number}" for number in range(100_000)))
    frame_table.touched = set(frames)
    # The first in the queue are those that were published last.
    residency.hold(frames[:-40_000:-1])
    (frame,) = residency.claim(1)
    assert frame_table.num_examined < 25_000
    assert frame == frames[-40_000] and frame not in frame_table.touched, "who comes next was not asked for"


def test_claim_when_all_that_is_held_was_asked_for_then_it_is_not_asked_about_again_and_again() -> None:
    frame_table = LargeFrameTable()
    residency = Residency(frame_table, 100_000)
    residency.hold(fill(residency, *(f"page {number}" for number in range(100_000))))
    assert residency.claim(1) == [] and frame_table.num_examined < 25_000


def test_evict_when_half_is_kept_and_the_rest_is_held_then_fewer_frames_are_found(
    frame_table: FakeFrameTable,
) -> None:
    residency = Residency(frame_table, 4, {"a", "b"})
    fill(residency, "a", "b")
    residency.hold(fill(residency, "x"))
    assert len(residency.claim(3)) == 1 and {"a", "b", "x"} == set(frame_table.key_of.values())


def test_evict_when_more_than_half_could_be_kept_then_it_goes_last_and_the_end_of_the_prefix_first(
    frame_table: FakeFrameTable,
) -> None:
    residency = Residency(frame_table, 3, {"a", "b", "c"})
    fill(residency, "a", "b", "c")
    fill(residency, "x")
    assert set(frame_table.key_of.values()) == {"a", "b", "x"}


def test_demote_when_a_chain_is_demoted_then_its_end_goes_before_older_pages_though_it_was_touched(
    frame_table: FakeFrameTable,
) -> None:
    residency = Residency(frame_table, 4)
    fill(residency, "old")
    frames = fill(residency, "stem", "dead", "end")
    frame_table.touched.update(frames)
    assert residency.demote(["dead", "end", "gone long ago"]) == 2
    fill(residency, "x", "y")
    assert set(frame_table.key_of.values()) == {"old", "stem", "x", "y"}
