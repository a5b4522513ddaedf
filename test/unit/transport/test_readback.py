# SPDX-License-Identifier: Apache-2.0
"""Page numbers on their way to the host: in order, behind their events, and never early."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.readback import ReadbackLane
from banyan.transport.cuda_ipc.ring_space import RingSpace

FORWARD, LANE = 1, 2


@pytest.fixture
def rig():
    gpu = FakeGpu()
    driver = FakeDriver(gpu)
    return gpu, driver, ReadbackLane(driver, stream=LANE, num_pages=4)


def numbers(data):
    return list(array("q", data))


def test_lane_when_the_forward_has_not_ended_then_nothing_is_taken(rig):
    gpu, driver, lane = rig
    pages = gpu.buffer([0, 0])
    gpu.enqueue(FORWARD, lambda: pages.words.__setitem__(slice(2), [7, 8]))
    done = driver.create_event()
    driver.record_event(done, FORWARD)
    lane.send("first", pages, behind=[done])
    gpu.run_stream(LANE)
    assert lane.take() is None and lane.num_pages == 2
    gpu.run()
    tag, data = lane.take()
    assert (tag, numbers(data), lane.num_pages) == ("first", [7, 8], 0)


def test_lane_when_several_were_sent_then_they_come_in_order(rig):
    gpu, _, lane = rig
    for tag in range(3):
        lane.send(tag, gpu.buffer([tag]), behind=[])
    gpu.run()
    assert [lane.take()[0] for _ in range(3)] == [0, 1, 2]
    assert lane.take() is None


def test_forget_when_called_then_only_later_ones_are_taken_and_the_room_comes_back(rig):
    gpu, _, lane = rig
    lane.send("old", gpu.buffer([1, 2]), behind=[])
    lane.forget()
    lane.send("new", gpu.buffer([3]), behind=[])
    gpu.run()
    assert lane.take()[0] == "new"
    assert lane.take() is None and lane.num_pages == 0


def test_lane_when_a_page_is_sent_twice_then_valueerror(rig):
    gpu, _, lane = rig
    with pytest.raises(ValueError, match="6 of 8 are taken"):
        for _ in range(3):
            lane.send("again", gpu.buffer([1, 2, 3]), behind=[])


def test_lane_when_the_driver_refuses_then_the_room_is_there_for_the_next_try(rig):
    gpu, driver, lane = rig
    lane.send("first", gpu.buffer([1]), behind=[])
    driver.refuse["copy_async"] = 0
    for _ in range(10):
        with pytest.raises(DriverError):
            lane.send("refused", gpu.buffer([2, 3, 4]), behind=[])
    driver.refuse.clear()
    lane.send("next", gpu.buffer([5, 6, 7, 8]), behind=[])
    gpu.run()
    assert [(tag, numbers(data)) for tag, data in (lane.take(), lane.take())] == [
        ("first", [1]),
        ("next", [5, 6, 7, 8]),
    ]
    assert lane.take() is None and lane.num_pages == 0


ENDS = {"give_back": 0, "take_back": -1}
"""Which of the stretches that are taken goes."""


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(1, 12), st.sampled_from(("take", *ENDS))), max_size=60))
def test_ring_when_half_is_free_then_a_stretch_of_that_size_is_found_and_none_overlap(capacity, steps):
    space, taken = RingSpace(capacity), []
    for size, step in steps:
        if step in ENDS and taken:
            getattr(space, step)()
            taken.pop(ENDS[step])
        elif space.num_taken + size <= capacity:
            offset = space.take(size)
            assert offset >= 0 and offset + size <= space.size
            assert all(offset + size <= other or other + length <= offset for other, length in taken)
            taken.append((offset, size))
        else:
            with pytest.raises(ValueError):
                space.take(size)
