# SPDX-License-Identifier: Apache-2.0
"""A GPU that runs when it is told to, in any order that its streams allow.

Calls are recorded and enqueued; nothing happens until ``step`` or ``run``. Streams run at the same time, so a seed
chooses which goes on: an order that the calls do not enforce will be broken by some seed. Memory is real memory of this
process, and every access is checked against what is allocated or mapped at that moment.
"""

from __future__ import annotations

import ctypes
import random
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.numbers_to_device import NumbersToDevice
from banyan.transport.cuda_ipc.opening import GivenUpError
from banyan.transport.cuda_ipc.places import PlaceTable

WORD_BYTES = 8
ALIGNMENT_BYTES = 256
"""Of what CUDA allocates."""


@dataclass
class Op:
    run: Callable[[], None]
    is_ready: Callable[[], bool] = field(default=lambda: True)


@dataclass
class Buffer:
    """Memory of the device, or pinned memory of the host; its words can be read and written for a test."""

    address: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.num_bytes // WORD_BYTES

    @property
    def words(self) -> ctypes.Array:
        return (ctypes.c_int64 * self.numel()).from_address(self.address)

    @property
    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.num_bytes)


class OpeningThread:
    """The thread that opens peers: it does nothing until it is told, as if every call took long."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable, Future]] = deque()
        self.is_running = False

    def submit(self, call: Callable) -> Future:
        self.jobs.append((call, Future()))
        return self.jobs[-1][1]

    def run(self) -> None:
        self.is_running = True
        while self.jobs:
            call, future = self.jobs.popleft()
            try:
                future.set_result(call())
            except (DriverError, ValueError, GivenUpError) as error:
                future.set_exception(error)
        self.is_running = False


class FakeGpu:
    """One device and the processes that use it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.streams: dict[int, deque[Op]] = defaultdict(deque)
        self.recorded: dict[int, int] = defaultdict(int)
        self.reached: dict[int, int] = defaultdict(int)
        self.reached_at: dict[int, int] = {}
        self.now_us = 0
        self.memory: dict[int, ctypes.Array] = {}
        self.exported: dict[bytes, int] = {}
        self.num_handles = self.num_events = 0
        self.opener = OpeningThread()
        self.free_bytes = 1 << 30
        self.registers_read_only = False
        """Whether the device can register memory for reading only. Discrete GPUs cannot."""

    # ---- memory

    def allocate(self, num_bytes: int) -> int:
        room = ctypes.create_string_buffer(num_bytes + ALIGNMENT_BYTES)
        address = -(-ctypes.addressof(room) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.memory[address] = (ctypes.c_char * num_bytes).from_buffer(room, address - ctypes.addressof(room))
        return address

    def buffer(self, words) -> Buffer:
        values = array("q", words)
        made = Buffer(self.allocate(len(values) * WORD_BYTES), len(values) * WORD_BYTES)
        made.words[:] = list(values)
        return made

    def check(self, address: int, num_bytes: int) -> None:
        inside = (base <= address and address + num_bytes <= base + len(block) for base, block in self.memory.items())
        assert any(inside), f"illegal address {address:#x} of {num_bytes} bytes"

    # ---- running

    def enqueue(self, stream: int, run: Callable[[], None], is_ready: Callable[[], bool] = lambda: True) -> None:
        self.streams[stream].append(Op(run, is_ready))

    def step(self) -> bool:
        """Run one operation of one stream that can go on; False when none can."""
        ready = [stream for stream, ops in sorted(self.streams.items()) if ops and ops[0].is_ready()]
        if not ready:
            return False
        self._run_next(self.random.choice(ready))
        return True

    def _run_next(self, stream: int) -> None:
        # Every operation takes a microsecond.
        self.now_us += 1
        self.streams[stream].popleft().run()

    def run_stream(self, stream: int) -> None:
        while self.streams[stream] and self.streams[stream][0].is_ready():
            self._run_next(stream)

    def run(self) -> None:
        while self.step():
            pass
        stuck = {stream: len(ops) for stream, ops in self.streams.items() if ops}
        assert not stuck, f"streams wait for ever: {stuck}"


class FakeDriver:
    """What one process sees of the device. ``calls`` are the names and arguments of its calls, in order."""

    torchs_stream = 0
    """Torch computes on the host here, at once, in memory of its own: what is copied in this order is there at once."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.calls: list[tuple] = []
        self.refuse: dict[str, int] = {}
        """Call name -> how many calls of that name still succeed."""
        self.mapped: dict[int, bytes] = {}
        self.num_openings: Counter[int] = Counter()
        """Of what is mapped: the driver counts how often a process has opened it, and closed it again."""
        self.entered: set[tuple[int, bool]] = {(get_ident(), False)}
        """Threads that have a context, and whether they are the one that opens, which is played by another."""
        self.slow_calls: list[tuple] = []
        """What a scheduling thread must not do while it serves: openings and registrations made on it."""
        self._timing_events: set[int] = set()

    def _called(self, name: str, *arguments) -> None:
        self.calls.append((name, *arguments))
        assert self._thread() in self.entered, f"{name} without a context"
        if name in self.refuse:
            self.refuse[name] -= 1
            if self.refuse[name] < 0:
                raise DriverError(name, "CUDA_ERROR_FAKE")

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    # ---- Streams

    def create_event(self) -> int:
        self._called("create_event")
        self.gpu.num_events += 1
        return self.gpu.num_events

    def create_timing_event(self) -> int:
        event = self.create_event()
        self._timing_events.add(event)
        return event

    def elapsed_s(self, first: int, last: int) -> float:
        self._called("elapsed_s", first, last)
        if not {first, last} <= self._timing_events:
            raise DriverError("elapsed_s", "CUDA_ERROR_INVALID_HANDLE")
        assert self.gpu.reached[first] and self.gpu.reached[last], "only events that are done have a time"
        return (self.gpu.reached_at[last] - self.gpu.reached_at[first]) / 1e6

    def destroy_event(self, event: int) -> None:
        self._called("destroy_event", event)

    def record_event(self, event: int, stream: int) -> None:
        self._called("record_event", event, stream)
        gpu = self.gpu
        gpu.recorded[event] += 1
        version = gpu.recorded[event]

        def reach() -> None:
            gpu.reached[event], gpu.reached_at[event] = version, gpu.now_us

        gpu.enqueue(stream, reach)

    def is_event_done(self, event: int) -> bool:
        self._called("is_event_done", event)
        return self.gpu.reached[event] >= self.gpu.recorded[event]

    def wait_event(self, stream: int, event: int) -> None:
        self._called("wait_event", stream, event)
        version = self.gpu.recorded[event]
        self.gpu.enqueue(stream, lambda: None, lambda: self.gpu.reached[event] >= version)

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._called("copy_async", target, source, num_bytes, stream)
        if stream == self.torchs_stream:
            ctypes.memmove(target, source, num_bytes)
            return

        def run() -> None:
            self.gpu.check(source, num_bytes)
            self.gpu.check(target, num_bytes)
            ctypes.memmove(target, source, num_bytes)

        self.gpu.enqueue(stream, run)

    def write_word(self, stream: int, address: int, value: int) -> None:
        self._called("write_word", stream, address, value)

        def run() -> None:
            self.gpu.check(address, 4)
            ctypes.c_uint32.from_address(address).value = value

        self.gpu.enqueue(stream, run)

    # ---- Flags

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        self._called("wait_flag", stream, address, value)
        word = ctypes.c_uint32.from_address(address)
        self.gpu.enqueue(stream, lambda: None, lambda: (word.value - value) % 2**32 < 2**31)

    # ---- Ipc

    def allocation_of(self, address: int) -> tuple[int, int]:
        self._called("allocation_of", address)
        for base, block in self.gpu.memory.items():
            if base <= address < base + len(block):
                return base, len(block)
        raise DriverError("allocation_of", "CUDA_ERROR_NOT_FOUND")

    def is_exportable(self, address: int) -> bool:
        self._called("is_exportable", address)
        return True

    def export_handle(self, base: int) -> bytes:
        """The same one each time, as long as the allocation lives."""
        self._called("export_handle", base)
        for handle, exported in self.gpu.exported.items():
            if exported == base:
                return handle
        self.gpu.num_handles += 1
        handle = self.gpu.num_handles.to_bytes(64, "little")
        self.gpu.exported[handle] = base
        return handle

    def open_handle(self, handle: bytes) -> int:
        self._slow("open_handle", handle)
        if handle not in self.gpu.exported:
            raise DriverError("open_handle", "CUDA_ERROR_MAP_FAILED")
        base = self.gpu.exported[handle]
        self.mapped[base] = handle
        self.num_openings[base] += 1
        return base

    def close_handle(self, base: int) -> None:
        self._called("close_handle", base)
        self.num_openings[base] -= 1
        if not self.num_openings[base]:
            del self.mapped[base]

    # ---- Memory

    def allocate(self, num_bytes: int) -> int:
        self._called("allocate", num_bytes)
        return self.gpu.allocate(num_bytes)

    def free(self, address: int) -> None:
        self._called("free", address)
        del self.gpu.memory[address]

    def free_bytes(self) -> int:
        return self.gpu.free_bytes

    def allocate_pinned(self, num_bytes: int) -> int:
        self._called("allocate_pinned", num_bytes)
        return self.gpu.allocate(num_bytes)

    free_pinned = free

    def register_host(self, address: int, num_bytes: int) -> int:
        self._slow("register_host", address, num_bytes)
        if protection(address) == "r--s":
            raise DriverError("register_host", "CUDA_ERROR_INVALID_VALUE")
        self.gpu.memory[address] = (ctypes.c_char * num_bytes).from_address(address)
        return address

    def register_host_reading(self, address: int, num_bytes: int) -> int:
        """As ``CudaDriver`` does where the device has no read-only registration: plainly."""
        if self.gpu.registers_read_only:
            self._slow("register_host_read_only", address, num_bytes)
            self.gpu.memory[address] = (ctypes.c_char * num_bytes).from_address(address)
            return address
        return self.register_host(address, num_bytes)

    def _slow(self, name: str, *arguments) -> None:
        self._called(name, *arguments)
        if not self.gpu.opener.is_running:
            self.slow_calls.append((name, *arguments))

    def unregister_host(self, address: int) -> None:
        self._called("unregister_host", address)
        del self.gpu.memory[address]

    # ---- Contexts

    def current_context(self) -> int:
        return id(self.gpu) if self._thread() in self.entered else 0

    def enter_context(self, context: int) -> None:
        assert context == id(self.gpu)
        self.entered.add(self._thread())

    def _thread(self) -> tuple[int, bool]:
        return get_ident(), self.gpu.opener.is_running


def torchs_uploads(gpu: FakeGpu, num_pages: int) -> NumbersToDevice:
    """Of numbers that torch reads."""
    driver = FakeDriver(gpu)
    driver.torchs_stream = 1 << 20
    return NumbersToDevice(driver, current_stream=lambda: driver.torchs_stream, num_pages=num_pages)


def protection(address: int) -> str:
    """How this process has mapped the page of ``address``: "rw-s" and the like."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_rest = line.split()
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end:
            return flags
    raise AssertionError(f"{address:#x} is not mapped")


class FakeKernel:
    """The page kernel's meaning, page by page, reading its tables when it runs and not when it is enqueued."""

    def __init__(self, driver: FakeDriver, places: PlaceTable, page_bytes: tuple[int, ...]) -> None:
        self.driver = driver
        self.places = places
        self.page_bytes = page_bytes

    def enqueue(self, *, stream: int, lists: PageLists, target_row: int, extents: range) -> None:
        self.driver._called("kernel", stream, extents)

        def word(address: int) -> int:
            self.driver.gpu.check(address, WORD_BYTES)
            return ctypes.c_int64.from_address(address).value

        def place(row: int, extent: int, page: int) -> int:
            first = self.places.address + row * 2 * self.places.num_extents * WORD_BYTES
            base = word(first + extent * WORD_BYTES)
            return base + page * word(first + (self.places.num_extents + extent) * WORD_BYTES)

        def copy_page(number: int, extent: int) -> None:
            row, source, target = (
                word(base + number * WORD_BYTES) for base in (lists.rows, lists.sources, lists.targets)
            )
            num_bytes = self.page_bytes[extent]
            from_, to = place(row, extent, source), place(target_row, extent, target)
            self.driver.gpu.check(from_, num_bytes)
            self.driver.gpu.check(to, num_bytes)
            ctypes.memmove(to, from_, num_bytes)

        for extent in extents:
            for number in range(lists.num_pages):
                # One operation for each page: a kernel's writes are not all there at once.
                self.driver.gpu.enqueue(stream, lambda number=number, extent=extent: copy_page(number, extent))
