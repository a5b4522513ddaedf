# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that Banyan makes, through NVIDIA's bindings (``cuda-python``). The bindings are
imported by the first object made. Tests pass a recorded fake.

Addresses, streams and events are plain integers, as the driver knows them. Every call works in the context that is
current on the calling thread, except where it says otherwise, and every call may raise ``DriverError``. None of them
waits for the device but those of memory, which are for the start and the end only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDLE_BYTES = 64
"""Size of a CUDA IPC memory handle."""

UUID_BYTES = 16

# Of cuMemHostRegister; preprocessor constants in CUDA's headers, which the bindings do not carry everywhere.
REGISTER_PORTABLE = 0x01
REGISTER_MAPPED = 0x02
REGISTER_READ_ONLY = 0x08

TEXT_BYTES = 96
"""Room for a name that the driver writes."""


class DriverError(RuntimeError):
    """A call that the driver refused. Most are final: after a fault the context answers everything with an error."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")


class CudaDriver:
    """The driver, in the current context. A stream runs what it is given in order; different streams run at once."""

    def __init__(self, bindings: Any = None) -> None:
        """
        Raises:
            DriverError: when there is no driver.
        """
        self._cuda = bindings or _bindings()
        self._green_contexts: list[Any] = []
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:
            # The bindings look for libcuda when the first call is made.
            raise DriverError("cuInit", str(error)) from error

    def _call(self, name: str, *arguments: Any) -> Any:
        """The results of a call: nothing, one, or a tuple.

        Raises:
            DriverError: when it did not succeed.
        """
        code, *results = getattr(self._cuda, name)(*arguments)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(name, getattr(code, "name", str(code)))
        return results[0] if len(results) == 1 else tuple(results)

    # ---- streams ------------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream, of the lowest priority, as SGLang's are."""
        lowest, _highest = self._call("cuCtxGetStreamPriorityRange")
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuStreamCreateWithPriority", int(flags), lowest))

    def create_partition_streams(self, num_sms: int, num_streams: int) -> tuple[list[int], int]:
        """Streams in one green context of at least ``num_sms`` processors (the driver rounds up), and their number."""
        cuda, device = self._cuda, self.current_device()
        lowest, _highest = self._call("cuCtxGetStreamPriorityRange")
        whole = self._call("cuDeviceGetDevResource", device, cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        groups, num_groups, _rest = self._call("cuDevSmResourceSplitByCount", 1, whole, 0, num_sms)
        if num_groups < 1:
            raise DriverError("cuDevSmResourceSplitByCount", f"no group of {num_sms} processors")
        described = self._call("cuDevResourceGenerateDesc", [groups[0]], 1)
        flags = cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._call("cuGreenCtxCreate", described, device, int(flags))
        self._green_contexts.append(context)
        flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        streams = [int(self._call("cuGreenCtxStreamCreate", context, int(flags), lowest)) for _ in range(num_streams)]
        return streams, int(groups[0].sm.smCount)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def create_event(self) -> int:
        """An event that was never recorded: it counts as done."""
        return int(self._call("cuEventCreate", int(self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def create_timing_event(self) -> int:
        """An event that also keeps when it was reached."""
        return int(self._call("cuEventCreate", int(self._cuda.CUevent_flags.CU_EVENT_DEFAULT)))

    def elapsed_s(self, first: int, last: int) -> float:
        """Seconds between two timing events that are both done."""
        return float(self._call("cuEventElapsedTime", first, last)) / 1000

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """The event is done once everything enqueued on ``stream`` so far is."""
        self._call("cuEventRecord", event, stream)

    def is_event_done(self, event: int) -> bool:
        """Whether the latest record of the event has been reached. Does not wait."""
        (code,) = self._cuda.cuEventQuery(event)
        if code == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError("cuEventQuery", getattr(code, "name", str(code)))
        return True

    def wait_event(self, stream: int, event: int) -> None:
        """What is enqueued on ``stream`` from now on runs after the record that ``event`` holds now."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between any two places of the unified address space. Host memory must be pinned."""
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Behind everything enqueued on ``stream`` so far, write 32 bits. Host memory must be pinned."""
        self._call("cuMemsetD32Async", address, value, 1, stream)

    # ---- words of mapped host memory that streams wait for, without a kernel ------------------------------------

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        """Hold ``stream`` until the word is at least ``value``, counted round the circle of 32 bits."""
        flags = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call("cuStreamWaitValue32", stream, address, value, int(flags))

    # ---- memory of other processes ------------------------------------------------------------------------------

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Base address and size of the allocation that ``address`` lies in."""
        base, num_bytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(num_bytes)

    def is_exportable(self, address: int) -> bool:
        """Whether its allocation has an IPC handle. Memory of virtual memory pools and expandable segments has none."""
        attribute = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return bool(self._call("cuPointerGetAttribute", attribute, address))

    def export_handle(self, base: int) -> bytes:
        """``HANDLE_BYTES`` bytes that another process opens. They are good while the allocation lives."""
        handle = self._call("cuIpcGetMemHandle", base)
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def open_handle(self, handle: bytes) -> int:
        """Map a peer's allocation for the current device; its address here. Once for each handle and process."""
        if len(handle) != HANDLE_BYTES:
            raise DriverError("cuIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        opened = self._cuda.CUipcMemHandle()
        ctypes.memmove(int(opened.getPtr()), handle, HANDLE_BYTES)
        # The flag enables peer access between the current device and the one that the memory lies on.
        flags = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", opened, int(flags)))

    def close_handle(self, base: int) -> None:
        """Unmap what ``open_handle`` returned. Nothing on the device may use it any more."""
        self._call("cuIpcCloseMemHandle", base)

    # ---- memory of our own --------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        return int(self._call("cuMemAlloc", num_bytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def free_bytes(self) -> int:
        """Of the device's memory."""
        free_bytes, _total_bytes = self._call("cuMemGetInfo")
        return int(free_bytes)

    def allocate_pinned(self, num_bytes: int) -> int:
        """Host memory that the device reaches under the same address."""
        return int(self._call("cuMemAllocHost", num_bytes))

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def register_host(self, address: int, num_bytes: int) -> int:
        """Pin memory that we already have, for all contexts; the device's address of it."""
        return self._register(address, num_bytes, REGISTER_PORTABLE | REGISTER_MAPPED)

    def register_host_reading(self, address: int, num_bytes: int) -> int:
        """As ``register_host``, for memory that the device only reads. It must be mapped for writing all the same: most
        GPUs cannot register what is not."""
        further = REGISTER_READ_ONLY if self.registers_read_only(self.current_device()) else 0
        return self._register(address, num_bytes, REGISTER_PORTABLE | REGISTER_MAPPED | further)

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self._call("cuMemHostRegister", address, num_bytes, flags)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # ---- contexts, for a second thread --------------------------------------------------------------------------

    def current_context(self) -> int:
        return int(self._call("cuCtxGetCurrent"))

    def enter_context(self, context: int) -> None:
        """Make it the calling thread's current one. A thread that had another is ours, and from then on may call while
        SGLang's captures a graph: in the mode "global", torch's, a registration or an opening in another thread would
        be refused and break the capture, though it has no part in it."""
        if self.current_context() == context:
            return
        self._call("cuCtxSetCurrent", context)
        self._call("cuThreadExchangeStreamCaptureMode", self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    # ---- questions ---------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return int(self._call("cuCtxGetDevice"))

    def device_uuid(self, device: int) -> bytes:
        return bytes(self._call("cuDeviceGetUuid", device).bytes)

    def num_devices(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def can_access(self, device: int, other: int) -> bool:
        """Whether kernels on ``device`` may read memory of ``other``."""
        return device == other or bool(self._call("cuDeviceCanAccessPeer", device, other))

    def registers_read_only(self, device: int) -> bool:
        """Whether memory can be registered for reading only. Discrete GPUs cannot."""
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
        return bool(self._call("cuDeviceGetAttribute", attribute, device))

    def driver_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows: major, minor."""
        number = int(self._call("cuDriverGetVersion"))
        return number // 1000, number % 1000 // 10

    def device_name(self, device: int) -> str:
        return _text(self._call("cuDeviceGetName", TEXT_BYTES, device))

    def pci_address(self, device: int) -> str:
        """As below ``/sys/bus/pci/devices``."""
        return _text(self._call("cuDeviceGetPCIBusId", TEXT_BYTES, device)).lower()

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Calls of this thread are for ``device`` meanwhile. For tools: a rank's context is torch's."""
        context = self._call("cuDevicePrimaryCtxRetain", device)
        before = self._call("cuCtxGetCurrent")
        try:
            self._call("cuCtxSetCurrent", context)
            yield
        finally:
            self._call("cuCtxSetCurrent", before)
            self._call("cuDevicePrimaryCtxRelease", device)

    def threads_per_sm(self, device: int) -> int:
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR
        return int(self._call("cuDeviceGetAttribute", attribute, device))

    def num_sms(self, device: int) -> int:
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(self._call("cuDeviceGetAttribute", attribute, device))


def _text(raw: Any) -> str:
    """A string of C, as the bindings return it."""
    return bytes(raw).split(b"\0", 1)[0].decode()


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("cuda-python", str(error)) from error
    return driver
