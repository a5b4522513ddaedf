# SPDX-License-Identifier: Apache-2.0
"""The stream that copies run on: in a partition of the GPU's processors where the driver allows it.

A copy kernel has a fixed grid (``--banyan-copy-sms``). Without a partition its programs take that many processors
somewhere; in a green context they are always the same ones, and compute keeps its caches and its balance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banyan.transport.cuda_ipc.driver import DriverError


class StreamMaker(Protocol):
    """The calls behind ``open_copy_stream``."""

    def create_stream(self) -> int: ...

    def create_partition_stream(self, num_sms: int) -> tuple[int, int]:
        """A stream on a partition of at least ``num_sms`` processors, and how many it got."""
        ...


@dataclass(frozen=True, slots=True)
class CopyStream:
    """``num_sms`` bounds what copies take. ``note`` is for the log: how, or why there is no partition."""

    stream: int
    num_sms: int
    is_partition: bool
    note: str


def open_copy_stream(maker: StreamMaker, *, num_sms: int, try_kernel: Callable[[int], None]) -> CopyStream:
    """A stream for copies. ``try_kernel`` launches one on a stream; what it raises rules a partition out.

    Raises:
        DriverError: when not even a plain stream can be made or used.
    """
    try:
        stream, granted = maker.create_partition_stream(num_sms)
        try_kernel(stream)
    except DriverError as error:
        stream = maker.create_stream()
        try_kernel(stream)
        return CopyStream(stream, num_sms, False, f"a plain stream, a grid of {num_sms} (no partition: {error})")
    return CopyStream(stream, granted, True, f"a partition of {granted} processors")
