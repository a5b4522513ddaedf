# SPDX-License-Identifier: Apache-2.0
"""Memory of the device: shared memory of this process, which others open by a handle of 64 bytes.

As with CUDA and torch's allocator: several tensors lie in one allocation; a handle names an allocation, not an address
in it; a process cannot open a handle of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import weakref

ALLOCATION_BYTES = 20 << 20
"""Of torch's allocator, for what is smaller."""
GRANULE_BYTES = 2 << 20
ALIGNMENT_BYTES = 512

_HANDLE = struct.Struct("<QQQ40x")


class Allocation(mmap.mmap):
    """One allocation: alive as long as something lies in it."""

    fd: int
    address: int
    tag = ""
    """Of memory that can be given back: by what name."""

    @classmethod
    def of(cls, fd: int, num_bytes: int) -> Allocation:
        made = cls(fd, num_bytes)
        made.fd = fd
        made.address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        weakref.finalize(made, os.close, fd)
        return made


class Memory:
    """What this process has allocated, and what of others it has opened. ``tag`` is that of tensors from now on."""

    tag = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self._held: dict[int, Allocation] = {}
        self._opened: dict[int, tuple[Allocation, bytes, int]] = {}
        self._current: Allocation | None = None
        self._used_bytes = 0

    def _allocate(self, num_bytes: int) -> Allocation:
        rounded = -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
        fd = os.memfd_create("cuda-stand-in")
        os.ftruncate(fd, rounded)
        made = Allocation.of(fd, rounded)
        made.tag = self.tag
        self._allocations[made.address] = made
        return made

    def tagged(self, tag: str) -> list[Allocation]:
        """What can be given back under this name."""
        return [allocation for allocation in self._allocations.values() if allocation.tag == tag]

    def is_exportable(self, address: int) -> bool:
        """Whether it lies in memory that can have a handle."""
        return any(
            base <= address < base + len(allocation) and not allocation.tag
            for base, allocation in list(self._allocations.items())
        )

    def buffer(self, num_bytes: int) -> memoryview:
        """Room for a tensor; small ones share an allocation."""
        with self._lock:
            if self.tag or num_bytes > ALLOCATION_BYTES // 2:
                return memoryview(self._allocate(num_bytes))[:num_bytes]
            if self._current is None or self._used_bytes + num_bytes > ALLOCATION_BYTES:
                self._current, self._used_bytes = self._allocate(ALLOCATION_BYTES), 0
            start = self._used_bytes
            self._used_bytes += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return memoryview(self._current)[start : start + num_bytes]

    def allocate(self, num_bytes: int) -> int:
        """An address, until ``free``."""
        with self._lock:
            made = self._allocate(num_bytes)
            self._held[made.address] = made
            return made.address

    def free(self, address: int) -> None:
        del self._held[address]

    def allocation_of(self, address: int) -> tuple[int, int] | None:
        """Base and size of the allocation that an address lies in, be it one of another process."""
        opened = {base: allocation for base, (allocation, _, _) in list(self._opened.items())}
        for base, allocation in [*self._allocations.items(), *opened.items()]:
            if base <= address < base + len(allocation):
                return base, len(allocation)
        return None

    def handle(self, base: int) -> bytes:
        allocation = self._allocations[base]
        return _HANDLE.pack(os.getpid(), allocation.fd, len(allocation))

    def open(self, handle: bytes) -> int:
        """
        Raises:
            OSError: when the handle is of this process, or of one that is gone.
        """
        for base, (allocation, known, num_users) in self._opened.items():
            if known == handle:
                self._opened[base] = allocation, known, num_users + 1
                return base
        pid, fd, num_bytes = _HANDLE.unpack(handle)
        if pid == os.getpid():
            raise OSError("a handle of this process")
        opened = Allocation.of(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), num_bytes)
        self._opened[opened.address] = opened, handle, 1
        return opened.address

    def close(self, base: int) -> None:
        allocation, handle, num_users = self._opened[base]
        if num_users > 1:
            self._opened[base] = allocation, handle, num_users - 1
        else:
            del self._opened[base]
