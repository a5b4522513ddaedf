# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a GPU: nothing on a queue happens before it must, and memory is opened as CUDA has it."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from test.cuda_stand_in.cuda_stand_in.device import Device
from test.cuda_stand_in.cuda_stand_in.memory import GRANULE_BYTES, Memory
from test.cuda_stand_in.cuda_stand_in.refused import Refused

TORCHS = 0
"""Torch's default stream."""
CAPTURED = 3
MEMORY = Path(__file__).parents[2] / "cuda_stand_in"


class Story:
    """Two steps on a queue, with an event behind each."""

    def __init__(self, order):
        self.device, self.seen = Device(order), []
        self.queue = self.device.create_queue()
        self.events = [self.device.create_event() for _ in range(2)]
        for number, event in enumerate(self.events):
            self.device.enqueue(self.queue, lambda number=number: self.seen.append(number))
            self.device.record(event, self.queue)


def test_queue_when_nobody_waits_then_it_has_not_run_as_late_as_that_or_at_once():
    assert Story("late").seen == [] and Story("soon").seen == [0, 1]


def test_queue_when_one_of_torchs_streams_waits_then_it_runs_so_far_and_no_further():
    story = Story("late")
    story.device.wait(TORCHS, story.events[0])
    assert story.seen == [0]


def test_queue_when_it_waits_for_another_then_that_one_runs_first():
    story = Story("late")
    second = story.device.create_queue()
    story.device.wait(second, story.events[0])
    story.device.enqueue(second, lambda: story.seen.append("second"))
    done = story.device.create_event()
    story.device.record(done, second)
    story.device.synchronize(done)
    assert story.seen == [0, "second"]


def test_queue_when_the_host_asks_again_and_again_then_it_comes_to_its_end():
    story = Story("late")
    assert not story.device.is_done(story.events[1])
    assert any(story.device.is_done(story.events[1]) for _ in range(4)) and story.seen == [0, 1]


def test_event_when_it_is_recorded_again_then_a_wait_is_for_the_record_that_it_saw():
    story = Story("late")
    (first, _), device = story.events, story.device
    second = device.create_queue()
    device.wait(second, first)
    device.enqueue(story.queue, lambda: story.seen.append("later"))
    device.record(first, story.queue)
    passed = device.create_event()
    device.record(passed, second)
    device.synchronize(passed)
    assert story.seen == [0]


def test_time_when_an_event_keeps_none_or_is_not_reached_then_refused_as_cuda_does():
    device = Device("late")
    queue, plain = device.create_queue(), device.create_event()
    first, last = (device.create_timing_event() for _ in range(2))
    for event in (plain, first):
        device.record(event, queue)
    for pair in ((plain, first), (first, plain), (first, last)):
        with pytest.raises(Refused, match="CUDA_ERROR"):
            device.elapsed_s(*pair)
    device.record(last, queue)
    with pytest.raises(Refused, match="NOT_READY"):
        device.elapsed_s(first, last)
    device.synchronize(last)
    assert device.elapsed_s(first, last) >= 0
    with pytest.raises(Refused, match="INVALID_HANDLE"):
        device.elapsed_s(plain, last)


def test_queue_when_only_the_host_can_let_it_go_on_then_asking_does_not_block():
    device, word = Device("late"), []
    queue, event = device.create_queue(), device.create_event()
    device.wait_until(queue, lambda: bool(word))
    device.record(event, queue)
    assert not any(device.is_done(event) for _ in range(3))
    word.append(1)
    assert any(device.is_done(event) for _ in range(3))


def test_queue_when_it_has_not_waited_for_a_streams_newest_event_then_it_lags():
    device = Device("late")
    queue, event = device.create_queue(), device.create_event()
    device.record(event, TORCHS)
    assert device.lag(queue) == {TORCHS} and not device.awaited_streams()
    device.wait(queue, event)
    assert not device.lag(queue) and device.awaited_streams() == {TORCHS}
    device.record(event, TORCHS)
    assert device.lag(queue) == {TORCHS}
    device.synchronize(event)
    assert not device.lag(queue), "the host has waited, and enqueues afterwards"
    device.record(event, TORCHS)
    device.synchronize_all()
    assert not device.lag(queue)


def test_graph_when_it_is_captured_then_its_streams_wait_for_no_other_event():
    device = Device("late")
    queue, outside, inside = device.create_queue(), device.create_event(), device.create_event()
    device.record(outside, queue)
    with device.capture.on(CAPTURED):
        device.record(inside, CAPTURED)
        device.wait(queue, inside)
        assert device.capture.includes(queue), "whoever waits for it is a part of it"
    with pytest.raises(Refused, match="INVALIDATED"), device.capture.on(CAPTURED):
        with pytest.raises(Refused, match="ISOLATION"):
            device.wait(CAPTURED, outside)


def test_event_when_it_was_recorded_in_a_graph_then_nobody_asks_for_it_until_it_is_recorded_elsewhere():
    device = Device("late")
    event = device.create_timing_event()
    with device.capture.on(CAPTURED):
        device.record(event, CAPTURED)
    for ask in (device.is_done, device.synchronize, lambda event: device.elapsed_s(event, event)):
        with pytest.raises(Refused, match="CAPTURED_EVENT"):
            ask(event)
    device.record(event, TORCHS)
    assert device.is_done(event)


@pytest.mark.parametrize("order", ["late", "soon", "1", "2"])
def test_queue_when_all_is_waited_for_then_it_ran_in_order(order):
    story = Story(order)
    story.device.synchronize_all()
    assert story.seen == [0, 1]


def test_memory_when_another_process_opens_it_then_it_sees_and_writes_the_same_bytes():
    memory = Memory()
    first, second = memory.buffer(1000), memory.buffer(1000)
    first[:5], second[:5] = b"first", b"other"
    address = ctypes.addressof(ctypes.c_char.from_buffer(second))
    base, num_bytes = memory.allocation_of(address)
    assert base < address and num_bytes % GRANULE_BYTES == 0, "tensors share an allocation"
    opened = f"""
import ctypes
from cuda_stand_in.memory import Memory
memory, handle = Memory(), bytes.fromhex("{memory.handle(base).hex()}")
base = memory.open(handle)
assert memory.open(handle) == base, "the driver counts"
assert memory.allocation_of(base + 1) == (base, {num_bytes})
memory.close(base)
print(ctypes.string_at(base + {address - base}, 5).decode())
ctypes.memmove(base + {address - base}, b"given", 5)
memory.close(base)
assert not memory._opened
"""
    command = [sys.executable, "-S", "-c", opened]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(MEMORY)}, check=True)
    assert done.stdout == "other\n" and bytes(second[:5]) == b"given" and bytes(first[:5]) == b"first"


def test_memory_when_this_process_opens_its_own_then_an_error_as_the_drivers():
    memory = Memory()
    with pytest.raises(OSError, match="of this process"):
        memory.open(memory.handle(memory.allocate(1)))
