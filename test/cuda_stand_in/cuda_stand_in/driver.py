# SPDX-License-Identifier: Apache-2.0
"""The driver's calls, as ``cuda-python`` names them: its own classes and constants, other functions behind them."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cuda_stand_in.memory import Memory
from cuda_stand_in.refused import Refused
from cuda_stand_in.streams import Streams

NUM_DEVICES = 8
NUM_SMS = 132
SM_THREADS = 2048
CONTEXT = 0xC0
HANDLE_BYTES = 64
UNSAFE = ("cuIpcOpen", "cuIpcClose", "cuMemAlloc", "cuMemFree", "cuMemGetInfo", "cuMemHost")
"""What no thread may call while one captures a graph, unless it has said that it is no part of it."""


class Driver:
    """Each public function stands for one of ``cuda.bindings.driver`` and answers as it does: the code comes first."""

    def __init__(self, bindings: Any, streams: Streams, memory: Memory, *, exports: Callable[[], bool]) -> None:
        """``exports``: whether memory has handles; that of virtual memory pools has none."""
        self._cuda = bindings
        self._device, self._streams, self._memory, self._exports = streams.device, streams, memory, exports
        self._ok = bindings.CUresult.CUDA_SUCCESS
        self._pinned: dict[int, Any] = {}
        self._registered: dict[int, int] = {}
        self._thread = threading.local()
        self.current_device = 0

    def install(self) -> None:
        """From now on the bindings answer so."""
        for name in dir(self):
            if name.startswith("cu") and name[2].isupper():
                setattr(self._cuda, name, self._answering(name, getattr(self, name)))

    def _answering(self, name: str, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            capture = self._device.capture
            try:
                if capture.is_active and name.startswith(UNSAFE) and not hasattr(self._thread, "is_relaxed"):
                    capture.refuse("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
                result = function(*arguments)
            except Refused as refused:
                return (getattr(self._cuda.CUresult, str(refused)),)
            except (OSError, KeyError):
                return (self._cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
            if isinstance(result, tuple):
                return result
            return (self._ok,) if result is None else (self._ok, result)

        return call

    # ---- devices and contexts

    def cuInit(self, flags: int) -> None: ...

    def cuDriverGetVersion(self) -> int:
        return 13000

    def cuDeviceGetCount(self) -> int:
        return NUM_DEVICES

    def cuCtxGetDevice(self) -> int:
        return self.current_device

    def cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=hashlib.blake2b(bytes([int(device)]), digest_size=16).digest())

    def cuDeviceCanAccessPeer(self, device: int, other: int) -> int:
        return 1

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        known = {"MULTIPROCESSOR_COUNT": NUM_SMS, "MAX_THREADS_PER_MULTIPROCESSOR": SM_THREADS}
        return known.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    def cuCtxGetCurrent(self) -> int:
        # The first thread computes: it has the context of torch.
        is_first = threading.current_thread() is threading.main_thread()
        return getattr(self._thread, "context", CONTEXT if is_first else 0)

    def cuCtxSetCurrent(self, context: int) -> None:
        assert context == CONTEXT
        self._thread.context = context

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        assert mode == self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._thread.is_relaxed = True
        return 0

    # ---- streams

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, int, int]:
        return self._ok, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self._device.create_queue()

    def cuDeviceGetDevResource(self, device: int, kind: Any) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=NUM_SMS))

    def cuDevSmResourceSplitByCount(self, num_groups: int, whole: Any, flags: int, num_sms: int) -> tuple[Any, ...]:
        group = SimpleNamespace(sm=SimpleNamespace(smCount=-(-num_sms // 8) * 8))
        return self._ok, [group], 1, whole

    def cuDevResourceGenerateDesc(self, groups: list[Any], num_groups: int) -> Any:
        return groups

    def cuGreenCtxCreate(self, described: Any, device: int, flags: int) -> Any:
        return described

    def cuGreenCtxStreamCreate(self, context: Any, flags: int, priority: int) -> int:
        return self._device.create_queue()

    def cuEventCreate(self, flags: int) -> int:
        is_plain = flags & self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return self._device.create_event() if is_plain else self._device.create_timing_event()

    def cuEventDestroy(self, event: int) -> None: ...

    def cuEventRecord(self, event: int, stream: int) -> None:
        self._device.record(event, stream)

    def cuEventQuery(self, event: int) -> tuple[Any]:
        return (self._ok if self._device.is_done(event) else self._cuda.CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventElapsedTime(self, first: int, last: int) -> float:
        return self._device.elapsed_s(first, last) * 1000

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._device.wait(stream, event)

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        self._device.wait_until(stream, lambda: (word.value - value) % 2**32 < 2**31)

    def cuMemcpyAsync(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        for address in (target, source):
            # CUDA would copy it in the calling thread: nobody here means that. Private memory may be a tensor's.
            if not self._knows(address) and protection(address).endswith("s"):
                raise Refused("CUDA_ERROR_INVALID_VALUE")
        self._check_order(target, source, stream)
        self._device.enqueue(stream, lambda: ctypes.memmove(target, source, num_bytes) and None)

    def _check_order(self, target: int, source: int, stream: int) -> None:
        """What the calling thread has torch compute, it computes on the current stream: a queue that copies a tensor is
        behind it. A tensor that stays on the device says where a kernel writes, so that queue is behind all streams
        that any queue waits for: they may write there, too."""
        if not self._device.is_queue(stream) or self._knows(source):
            return
        writing = self._device.awaited_streams() if self._memory.allocation_of(target) is not None else set()
        early = self._device.lag(stream) & {self._streams.current().cuda_stream, *writing}
        if early:
            raise AssertionError(f"a queue copies a tensor and has not waited for torch's streams {early}")

    def cuMemsetD32Async(self, address: int, value: int, num_words: int, stream: int) -> None:
        words = (ctypes.c_uint32 * num_words).from_address(address)
        self._device.enqueue(stream, lambda: words.__setitem__(slice(None), [value] * num_words))

    # ---- memory

    def cuMemAlloc(self, num_bytes: int) -> int:
        return self._memory.allocate(num_bytes)

    def cuMemFree(self, address: int) -> None:
        self._memory.free(address)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._ok, 1 << 30, 1 << 34

    def _knows(self, address: int) -> bool:
        """Whether it lies in memory of the device, or in memory of the host that was pinned."""
        pinned = {base: len(block) for base, block in list(self._pinned.items())} | self._registered
        is_pinned = any(base <= address < base + num_bytes for base, num_bytes in pinned.items())
        return is_pinned or self._memory.allocation_of(address) is not None

    def cuMemAllocHost(self, num_bytes: int) -> int:
        block = ctypes.create_string_buffer(num_bytes)
        self._pinned[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def cuMemFreeHost(self, address: int) -> None:
        del self._pinned[address]

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Any, ...] | None:
        if address in self._registered:
            return (self._cuda.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        if "w" not in protection(address):
            return (self._cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._registered[address] = num_bytes
        return None

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        return address

    def cuMemHostUnregister(self, address: int) -> None:
        del self._registered[address]

    # ---- memory of other processes

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        found = self._memory.allocation_of(address)
        return (self._cuda.CUresult.CUDA_ERROR_NOT_FOUND,) if found is None else (self._ok, *found)

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> int:
        return int(self._exports() and self._memory.is_exportable(address))

    def cuIpcGetMemHandle(self, base: int) -> Any:
        handle = self._cuda.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), self._memory.handle(base), HANDLE_BYTES)
        return handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> int:
        return self._memory.open(ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES))

    def cuIpcCloseMemHandle(self, base: int) -> None:
        self._memory.close(base)


def protection(address: int) -> str:
    """How this process has mapped the page of ``address``: "rw-s" and the like."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_rest = line.split()
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end:
            return flags
    return ""
