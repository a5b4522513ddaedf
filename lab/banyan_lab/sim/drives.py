# SPDX-License-Identifier: Apache-2.0
"""An SSD whose reads and writes disturb each other.

The measured law: a drive divides its time between what is queued, and a queued write counts for ``write_weight`` reads.
So with read depth r and write depth w, reads get r / (r + weight * w) of their bandwidth alone, and writes the rest of
theirs. One weight fits five measurements from (1, 1) to (8, 32) within 8 % (docs/simulator.md).
"""

from __future__ import annotations

from banyan_lab.sim.engine import Action, Simulation
from banyan_lab.sim.hardware import Drive, write_weight
from banyan_lab.sim.resources import Link


def read_share(read_depth: float, write_depth: float, weight: float) -> float:
    """Share of the drive's time that reads get. 0 when there are none."""
    if read_depth <= 0:
        return 0.0
    return read_depth / (read_depth + weight * write_depth)


class SharedDrive:
    """Reads and writes of one drive; transfers of a kind share its depth and its bandwidth."""

    def __init__(self, sim: Simulation, spec: Drive, *, read_depth: int, write_depth: int) -> None:
        self._spec = spec
        self._read_depth = read_depth
        self._write_depth = write_depth
        self._weight = write_weight()
        self.reads = Link(sim, "ssd.reads", spec.read_bytes_per_s)
        self.writes = Link(sim, "ssd.writes", spec.write_bytes_per_s)

    def read(self, num_bytes: float, then: Action, *args: object) -> None:
        self.reads.start(num_bytes, self._ended, then, args)
        self._share()

    def write(self, num_bytes: float, then: Action, *args: object) -> None:
        self.writes.start(num_bytes, self._ended, then, args)
        self._share()

    def _ended(self, then: Action, args: tuple[object, ...]) -> None:
        self._share()
        then(*args)

    def _share(self) -> None:
        reading, writing = self.reads.num_flows > 0, self.writes.num_flows > 0
        share = read_share(self._read_depth * reading, self._write_depth * writing, self._weight)
        for link, rate in (
            (self.reads, self._spec.read_bytes_per_s * share),
            (self.writes, self._spec.write_bytes_per_s * (1 - share)),
        ):
            if rate > 0 and rate != link.bytes_per_s:
                link.set_rate(rate)
