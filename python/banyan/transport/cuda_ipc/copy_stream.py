# SPDX-License-Identifier: Apache-2.0
"""The streams that copies run on: in a partition of the GPU's processors where the driver allows it.

A copy kernel has a fixed grid. Without a partition it has a program for each processor that copies may take
(``--banyan-copy-sms``): the device spreads them. In a green context the processors are always the same ones, and
compute keeps its caches and its balance; there as many programs share a processor as fit. Copies down to the arena run
outside of it, where compute runs: they have the small grid that fills their link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError

BACKUP_PROGRAMS = 16
"""The most that a copy down to the arena may have: 16 tiles are 512 KiB in flight, five times what a link of 50 GB/s
and 2 us takes."""


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """``num_sms`` bounds what copies take. ``note`` is for the log: how, or why there is no partition."""

    streams: list[int]
    num_sms: int
    is_partition: bool
    note: str

    def num_programs(self, per_sm: int) -> int:
        """The grid of a copy of which a processor runs ``per_sm`` programs at once."""
        return self.num_sms * per_sm if self.is_partition else self.num_sms

    @property
    def num_backup_programs(self) -> int:
        """The grid of a copy down to the arena."""
        return min(self.num_sms, BACKUP_PROGRAMS)


def open_copy_streams(
    driver: CudaDriver, *, num_sms: int, num_streams: int, try_stream: Callable[[int], None]
) -> CopyStreams:
    """Streams for copies. ``try_stream`` does on one what copies do; what it raises rules a partition out.

    Raises:
        DriverError: when not even plain streams can be made or used.
    """
    try:
        streams, granted = driver.create_partition_streams(num_sms, num_streams)
        for stream in streams:
            try_stream(stream)
    except DriverError as error:
        streams = [driver.create_stream() for _ in range(num_streams)]
        for stream in streams:
            try_stream(stream)
        return CopyStreams(streams, num_sms, False, f"plain streams, a grid of {num_sms} (no partition: {error})")
    return CopyStreams(streams, granted, True, f"a partition of {granted} processors")
