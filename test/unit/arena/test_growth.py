# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import Executor, Future

import pytest

from banyan.arena.growth import MOST_REST_NS, REST_NS, Growth


class Later(Executor):
    """Does a step when it is told to."""

    def __init__(self):
        self.steps = []

    def submit(self, step, /, *args):
        future = Future()
        self.steps.append((future, step, args))
        return future

    def work(self):
        future, step, args = self.steps.pop(0)
        try:
            future.set_result(step(*args))
        except OSError as error:
            future.set_exception(error)

    def shutdown(self, wait=True, *, cancel_futures=False):
        while self.steps:
            self.work()


class Machine:
    def __init__(self, room=True):
        self.room = room
        self.now_ns = 0
        self.backed = []
        self.error = None
        self.rests = False

    def back(self, start, stop):
        if self.error is not None:
            raise self.error
        self.backed.append((start, stop))


@pytest.fixture
def rig():
    machine, later = Machine(), Later()
    growth = Growth(
        num_frames=25,
        step_frames=10,
        ahead_frames=20,
        back=machine.back,
        has_room=lambda num_frames: machine.room,
        executor=later,
        clock=lambda: machine.now_ns,
        is_resting=lambda: machine.rests,
    )
    return growth, machine, later


def test_poll_when_frames_run_out_then_a_step_is_taken_and_nobody_waits(rig):
    growth, machine, later = rig
    assert growth.poll(0) == 0 and growth.poll(0) == 0
    assert len(later.steps) == 1, "one step at a time"
    later.work()
    assert growth.poll(0) == 10 and machine.backed == [(0, 10)]


def test_poll_when_enough_is_unused_then_nothing_is_taken(rig):
    growth, _, later = rig
    assert growth.poll(20) == 0 and later.steps == []


def test_poll_when_steps_rest_for_others_then_none_is_taken_and_nobody_is_told_of_a_refusal(rig, caplog):
    growth, machine, later = rig
    machine.rests = True
    assert growth.poll(0) == 0 and later.steps == [] and not caplog.records
    machine.rests = False
    growth.poll(0)
    later.work()
    assert growth.poll(0) == 10


def test_poll_when_the_part_is_full_then_no_more(rig):
    growth, machine, later = rig
    for _ in range(5):
        growth.poll(0)
        if later.steps:
            later.work()
    assert machine.backed == [(0, 10), (10, 20), (20, 25)]
    assert growth.num_backed == 25


def test_poll_when_the_machine_has_no_room_then_asked_again_after_a_rest(rig, caplog):
    growth, machine, later = rig
    machine.room = False
    growth.poll(0)
    later.work()
    assert growth.poll(0) == 0 and growth.num_backed == 0 and machine.backed == []
    assert later.steps == [] and len(caplog.records) == 1
    machine.room, machine.now_ns = True, REST_NS
    growth.poll(0)
    later.work()
    assert growth.poll(0) == 10


def test_poll_when_the_kernel_refuses_then_the_frames_stay_out(rig):
    growth, machine, later = rig
    machine.error = OSError(12, "no memory")
    growth.poll(0)
    later.work()
    assert growth.poll(0) == 0 and growth.num_backed == 0


def test_close_when_a_step_is_under_way_then_it_ends_and_no_other_begins(rig):
    growth, _, later = rig
    growth.poll(0)
    later.work()
    growth.close()
    assert growth.poll(0) == 0 and later.steps == []


def test_poll_when_the_machine_has_no_room_for_long_then_it_is_asked_ever_more_rarely(rig):
    growth, machine, later = rig
    machine.room, num_asked = False, 0
    for seconds in range(600):
        machine.now_ns = seconds * 10**9
        growth.poll(0)
        if later.steps:
            later.work()
            num_asked += 1
    assert num_asked <= 16
    machine.room, machine.now_ns = True, machine.now_ns + MOST_REST_NS
    growth.poll(0)
    later.work()
    assert growth.poll(0) == 10
