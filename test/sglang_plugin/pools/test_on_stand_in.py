# SPDX-License-Identifier: Apache-2.0
"""A rank's calls for its device on the stand-in for a GPU, in a process that sees it: what CUDA would refuse."""

import os
import subprocess
import sys
from pathlib import Path

STAND_IN = Path(__file__).parents[2] / "cuda_stand_in"


def said_on_stand_in(program):
    path = os.pathsep.join((str(STAND_IN), *sys.path))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_STAND_IN": "late", "SGLANG_USE_CPU_ENGINE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


ORDERED = """
import torch
from banyan.transport.cuda_ipc.copies import LayerGroups
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.lane import Lane
from banyan.transport.cuda_ipc.page_lists import Part
from banyan.transport.cuda_ipc.readback import ReadbackLane


class NoKernel:
    def enqueue(self, **_):
        print("copied")


driver, schedule, forward = CudaDriver(), torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.set_stream(schedule)
readback = ReadbackLane(driver, stream=driver.create_stream(), num_pages=9)
made = {"driver": driver, "kernel": NoKernel(), "groups": LayerGroups((1,), 1), "num_pages": 9, "target_row": 0}
lane = Lane(stream=driver.create_stream(), **made)
numbers, kept = torch.arange(2, device="cuda"), []


def send(behind):
    readback.send("numbers", numbers, behind=behind)
    print("sent")


def copy(behind):
    lane.begin()
    lane.enqueue([Part([(0, bytes(16))], numbers)], behind)


for enqueue in (send, copy):
    for awaited in ((schedule, forward), (schedule,), (forward,), ()):
        kept.append([stream.record_event() for stream in (schedule, forward)])
        events = dict(zip((schedule, forward), kept[-1]))
        try:
            enqueue([events[stream].cuda_event for stream in awaited])
        except AssertionError as early:
            print(early)
"""
EARLY = "a queue copies a tensor and has not waited for torch's streams {%s}"


def test_queue_when_it_has_not_waited_for_what_computes_a_tensor_then_its_copy_is_refused():
    """Or no byte here could say so: torch computes at once. What is freed is told behind the current stream alone."""
    said = said_on_stand_in(ORDERED)
    assert said[:4] == ["sent", "sent", EARLY % 1, EARLY % 1]
    assert said[4:] == ["copied", EARLY % 2, EARLY % 1, EARLY % "1, 2"]


UNPINNED = """
import ctypes, mmap
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError

driver, block = CudaDriver(), mmap.mmap(-1, 1 << 12)
start, room = ctypes.addressof(ctypes.c_char.from_buffer(block)), driver.allocate(64)
for target, source in ((room, start), (start + 64, room)):
    try:
        driver.copy_async(target, source, 64, 0)
    except DriverError as refused:
        print(refused)
driver.register_host(start, 1 << 12)
driver.copy_async(room, start, 64, 0)
driver.copy_async(start + 64, room, 64, 0)
"""


def test_copy_when_the_hosts_side_was_never_pinned_then_refused():
    assert said_on_stand_in(UNPINNED) == ["cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"] * 2


CAPTURING = """
import torch
from banyan.sglang_plugin.pools.device_access import current_stream, markable_stream
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan.transport.cuda_ipc.layer_times import LayerTimer


def timed(stream):
    told = []
    timer = LayerTimer(CudaDriver(), num_layers=2, current_stream=stream, took=lambda forward, us: told.append(forward))

    def run(forward):
        timer.begin(forward)
        timer.tick(0)
        timer.tick(1)

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run("captured")
    run("plain")
    timer.poll()
    return told


print(timed(markable_stream))
try:
    timed(current_stream)
except DriverError as refused:
    print(refused)
"""


def test_forward_when_it_is_captured_then_no_event_of_it_is_asked_for():
    """Without the guard CUDA refuses the question, at the first request behind the start."""
    assert said_on_stand_in(CAPTURING) == ["['plain']", "cuEventQuery: CUDA_ERROR_CAPTURED_EVENT"]
