# SPDX-License-Identifier: Apache-2.0
"""May a write start now? Reads before writes, writes only in predicted slack, never more than two at once.

Why: a writer at queue depth 32 cut a reader of the same device from 1232 to 90-200 MB/s, one at depth 1-2 left it some
1000 (measured; docs/design/0004-pacing.md). So a write never starts while anybody on the node reads or is about to,
and the write that is under way when a read arrives is at most two blocks long.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WRITE_DEPTH = 2
"""Writes in flight on one device."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """What one device of the node is doing for all ranks together.

    Attributes:
        num_reads: reads in flight or waiting, of every rank. A request that waits for a read counts.
        num_writes: writes in flight, of every rank.
    """

    num_reads: int
    num_writes: int


def num_writes_allowed(load: DeviceLoad, *, slack_us: float, write_us: float) -> int:
    """How many more writes may start now.

    Args:
        load: what the device is doing.
        slack_us: time until the next read may come, as predicted; infinite on an idle rank.
        write_us: time that one write is expected to take.

    Writes at one device take turns, so those in flight use up slack as well.
    """
    if load.num_reads > 0:
        return 0
    free = max(0, MAX_WRITE_DEPTH - load.num_writes)
    allowed = 0
    while allowed < free and (load.num_writes + allowed + 1) * write_us <= slack_us:
        allowed += 1
    return allowed
