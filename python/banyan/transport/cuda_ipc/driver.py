# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that Banyan makes, as protocols. Tests pass a recorded fake.

Addresses, streams and events are plain integers, as the driver knows them. Every call works in the context that is
current on the calling thread, except where it says otherwise, and every call may raise ``DriverError``. None of them
waits for the device but those of ``Memory``.
"""

from __future__ import annotations

from typing import Protocol

HANDLE_BYTES = 64
"""Size of a CUDA IPC memory handle."""

UUID_BYTES = 16


class DriverError(RuntimeError):
    """A call that the driver refused. Most are final: after a fault the context answers everything with an error."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.call = call
        self.code = code


class Streams(Protocol):
    """Order on the device. A stream runs what it is given in that order; different streams run at the same time."""

    def create_event(self) -> int:
        """An event that was never recorded: it counts as done."""
        ...

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None:
        """The event is done once everything enqueued on ``stream`` so far is."""
        ...

    def is_event_done(self, event: int) -> bool:
        """Whether the latest record of the event has been reached. Does not wait."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """What is enqueued on ``stream`` from now on runs after the record that ``event`` holds now."""
        ...

    def create_timing_event(self) -> int:
        """An event that also keeps when it was reached."""
        ...

    def elapsed_s(self, first: int, last: int) -> float:
        """Seconds between two timing events that are both done."""
        ...

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between any two places of the unified address space. Host memory must be pinned."""
        ...

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Behind everything enqueued on ``stream`` so far, write 32 bits. Host memory must be pinned."""
        ...


class Flags(Protocol):
    """Words of mapped host memory that streams wait for, without a kernel."""

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        """Hold ``stream`` until the word is at least ``value``, counted round the circle of 32 bits."""
        ...


class Ipc(Protocol):
    """Memory of other processes."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Base address and size of the allocation that ``address`` lies in."""
        ...

    def is_exportable(self, address: int) -> bool:
        """Whether its allocation has an IPC handle. Memory of virtual memory pools and expandable segments has none."""
        ...

    def export_handle(self, base: int) -> bytes:
        """``HANDLE_BYTES`` bytes that another process opens. They are good while the allocation lives."""
        ...

    def open_handle(self, handle: bytes) -> int:
        """Map a peer's allocation for the current device; its address here. Once for each handle and process."""
        ...

    def close_handle(self, base: int) -> None:
        """Unmap what ``open_handle`` returned. Nothing on the device may use it any more."""
        ...


class Memory(Protocol):
    """Allocations of our own. At start and end only: these calls may wait for the device."""

    def allocate(self, num_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...

    def free_bytes(self) -> int:
        """Of the device's memory."""
        ...

    def allocate_pinned(self, num_bytes: int) -> int:
        """Host memory that the device reaches under the same address."""
        ...

    def free_pinned(self, address: int) -> None: ...

    def register_host(self, address: int, num_bytes: int) -> int:
        """Pin memory that we already have, for all contexts; the device's address of it."""
        ...

    def register_host_reading(self, address: int, num_bytes: int) -> int:
        """As ``register_host``, for memory that the device only reads. It must be mapped for writing all the same: most
        GPUs cannot register what is not."""
        ...

    def unregister_host(self, address: int) -> None: ...


class Contexts(Protocol):
    """What a second thread needs to make calls."""

    def current_context(self) -> int: ...

    def enter_context(self, context: int) -> None:
        """Make it the calling thread's current one."""
        ...


class CopyDriver(Streams, Ipc, Memory, Contexts, Protocol):
    """What fetching from peers takes."""
