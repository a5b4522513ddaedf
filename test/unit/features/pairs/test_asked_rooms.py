# SPDX-License-Identifier: Apache-2.0
"""Rooms that nobody comes to do not pile up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from banyan.features.pairs.asked_rooms import AskedRooms


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_rooms_when_more_are_asked_for_than_may_wait_then_the_oldest_are_forgotten():
    rooms = AskedRooms(Clock(), max_rooms=3)
    assert [rooms.asked(room, 0) for room in (1, 2, 3, 2, 4, 5)] == [[], [], [], [], [1], [2]]


def test_rooms_when_nobody_has_come_in_time_then_they_are_forgotten():
    clock = Clock()
    rooms = AskedRooms(clock, patience_s=10.0)
    for room in (1, 2):
        rooms.asked(room, 0)
    clock.now_s = 10.5
    assert rooms.asked(3, 0) == [1, 2]


def test_room_when_its_request_has_come_then_it_is_never_forgotten():
    rooms = AskedRooms(Clock(), max_rooms=1)
    rooms.asked(1, 0)
    rooms.claim(1)
    rooms.claim(2)
    assert rooms.asked(2, 0) == rooms.asked(1, 0) == []
    assert rooms.asked(3, 0) == [] and rooms.asked(4, 0) == [3]
    assert rooms.is_claimed(1)
    rooms.release(1)
    rooms.release(1)
    assert not rooms.is_claimed(1) and rooms.asked(1, 0) == [4]


def test_rooms_when_requests_leave_them_then_the_oldest_are_forgotten_but_for_those_that_are_claimed_again():
    clock = Clock()
    rooms = AskedRooms(clock, max_rooms=2, patience_s=10.0)
    for room in (1, 2, 3):
        rooms.claim(room)
    assert [rooms.left(room) for room in (1, 2)] == [[], []] and not rooms.is_claimed(1)
    rooms.claim(1)
    assert [rooms.left(room) for room in (3, 4)] == [[], [2]]
    clock.now_s = 10.5
    assert rooms.left(5) == [3, 4] and rooms.is_claimed(1)


def test_room_when_it_was_left_and_is_asked_for_then_it_waits_as_any_other():
    rooms = AskedRooms(Clock(), max_rooms=1)
    rooms.left(1)
    assert rooms.asked(1, 0) == []
    assert rooms.left(2) == [] and rooms.asked(3, 0) == [1]


def test_room_when_it_was_left_for_long_and_no_other_is_then_it_is_forgotten_all_the_same():
    clock = Clock()
    rooms = AskedRooms(clock, patience_s=10.0)
    rooms.left(1)
    clock.now_s = 10.5
    assert rooms.asked(2, 0) == [1]


def test_rooms_when_what_they_were_asked_for_by_is_too_large_then_the_oldest_are_forgotten_but_for_those_of_requests():
    rooms = AskedRooms(Clock(), max_bytes=10)
    assert [rooms.asked(1, 4), rooms.asked(1, 4), rooms.asked(2, 4)] == [[], [], [1]]
    rooms.claim(2)
    assert rooms.asked(2, 20) == rooms.asked(3, 10) == []
    assert rooms.left(2) == [2], "larger than all that may be kept"
    assert rooms.asked(4, 1) == [3]


NUMBERS = st.integers(0, 9)


@given(st.lists(st.tuples(st.sampled_from(["asked", "claim", "release"]), NUMBERS, st.floats(0, 3), NUMBERS)))
def test_rooms_when_anything_happens_then_no_more_wait_than_may_and_each_is_forgotten_once(events):
    clock = Clock()
    rooms, waiting = AskedRooms(clock, max_rooms=4, max_bytes=25, patience_s=5.0), set()
    for what, room, later_s, num_bytes in events:
        clock.now_s += later_s
        forgotten = (rooms.asked(room, num_bytes) if what == "asked" else getattr(rooms, what)(room)) or []
        if what == "asked" and not rooms.is_claimed(room):
            waiting.add(room)
        if what == "claim":
            waiting.discard(room)
        assert len(set(forgotten)) == len(forgotten) and set(forgotten) <= waiting
        waiting -= set(forgotten)
        assert len(waiting) <= 4
