# SPDX-License-Identifier: Apache-2.0
"""``torch-memory-saver`` over the stand-in's memory: what is given back has no bytes, and who touches it ends.

As with the original, an address stays what it is, what comes back is empty, and there is no handle of such memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

from cuda_stand_in.memory import Memory

PROT_NONE = 0


class Saver:
    """Stands for ``torch_memory_saver.torch_memory_saver``."""

    enabled = True

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._libc = ctypes.CDLL(None, use_errno=True)

    def install(self, adapter: ModuleType) -> None:
        """``adapter`` is SGLang's module."""
        adapter._memory_saver = self
        adapter.torch_memory_saver = SimpleNamespace(configure_subprocess=contextlib.nullcontext)

    @contextlib.contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        before, self._memory.tag = self._memory.tag, "" if enable_cpu_backup else tag
        try:
            yield
        finally:
            self._memory.tag = before

    def pause(self, *, tag: str) -> None:
        for allocation in self._memory.tagged(tag):
            allocation.madvise(mmap.MADV_REMOVE)
            self._protect(allocation.address, len(allocation), PROT_NONE)

    def resume(self, *, tag: str) -> None:
        for allocation in self._memory.tagged(tag):
            self._protect(allocation.address, len(allocation), mmap.PROT_READ | mmap.PROT_WRITE)

    def _protect(self, address: int, num_bytes: int, protection: int) -> None:
        if self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), protection):
            raise OSError(ctypes.get_errno(), "mprotect")
