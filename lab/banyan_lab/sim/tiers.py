# SPDX-License-Identifier: Apache-2.0
"""One GPU with its KV in DRAM or on drives: the layer pipeline of a prefill, and what becomes of its writes.

A request has ``prefix_tokens`` in the tier and computes ``new_tokens``. Layer-wise, the transfer of layer l runs ahead
of the computation of layer l, which waits for it; otherwise everything is loaded first. New KV is written back: at
once, in the layer that made it (``UNPACED``), or as a server does (``PACED``): not while a prefill runs, and
then as the store's own gate lets writes start, reads first and at most two blocks deep.

The bubble is the time that the GPU waits for KV: the time of the forward pass less the time it computes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from banyan._native import WriteGate
from banyan.pacing.write_pause import WritePause
from banyan_lab.sim.compute import PrefillModel
from banyan_lab.sim.drives import SharedDrive
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.hardware import Drive
from banyan_lab.sim.resources import Link

READ_DEPTH = 8
UNPACED_WRITE_DEPTH = 8
"""As deep as the reads: an interleaved pipeline submits both from one loop."""
PACED_WRITE_DEPTH = 2
WRITE_BLOCK_BYTES = 4 << 20
BACKLOG_BYTES = 8 << 30
POLL_S = 2e-4
"""How often the store's I/O thread asks the gate."""


class Writes(Enum):
    NONE = "none"
    UNPACED = "unpaced"
    PACED = "paced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where KV waits.

    Attributes:
        drive: its bandwidths; DRAM is a drive that writes do not disturb (``writes`` NONE).
        layerwise: loading hides behind compute.
        object_s: CPU time for each object that is read, one after the other: a key or a value of one block and layer.
    """

    title: str
    drive: Drive
    layerwise: bool
    object_s: float
    writes: Writes


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request: what lies in the tier and what is computed."""

    prefix_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Forward:
    """What one prefill took, in seconds."""

    total_s: float
    compute_s: float

    @property
    def bubble_s(self) -> float:
        return self.total_s - self.compute_s


class TieredGpu:
    """Requests of one GPU, one after the other. ``run`` plays them and yields what each took."""

    def __init__(self, tier: Tier, cost: PrefillModel, *, block_tokens: int = 16) -> None:
        self._sim = Simulation()
        self._tier = tier
        self._cost = cost
        self._block_tokens = block_tokens
        self._num_layers = cost.model.num_layers
        self._layer_bytes = cost.model.kv_bytes_per_token / self._num_layers
        depth = PACED_WRITE_DEPTH if tier.writes is Writes.PACED else UNPACED_WRITE_DEPTH
        self.drive = SharedDrive(self._sim, tier.drive, read_depth=READ_DEPTH, write_depth=depth)
        # Objects are read one after the other: as bandwidth, so that it is a resource like the others.
        self._control = Link(self._sim, "cpu.objects", 1 / tier.object_s) if tier.object_s else None
        self._gate = WriteGate()
        self._pause = WritePause(self._gate)
        self._backlog: deque[int] = deque()
        self.backlog_bytes = 0
        """What waits or is in flight."""
        self.num_writing = 0
        self.dropped_bytes = 0
        self._polls = False

    def run(self, requests: list[Prefill]) -> list[Forward]:
        """Play the requests."""
        done: list[Forward] = []
        queue = list(reversed(requests))

        def next_one() -> None:
            if queue:
                self._forward(queue.pop(), ended)

        def ended(forward: Forward) -> None:
            done.append(forward)
            self._sim.after(0.0, next_one)

        next_one()
        self._sim.run()
        self.drive.reads.audit()
        self.drive.writes.audit()
        return done

    @property
    def io_s(self) -> float:
        """Time that the slower of drive and control path was at work for reads."""
        return max(self.drive.reads.busy_s, self._control.busy_s if self._control else 0.0)

    # ---- the pipeline ------------------------------------------------------------------------------------------

    def _forward(self, request: Prefill, ended: Callable[[Forward], None]) -> None:
        new, prefix = request.new_tokens, request.prefix_tokens
        work_s = self._cost.linear_s(new) + self._cost.attention_s(new_tokens=new, cached_tokens=prefix)
        layer_s = work_s / self._num_layers
        began_s = self._sim.now_s
        loaded = [False] * self._num_layers
        state = {"layer": 0, "computing": False}
        self._pause.begin_prefill()

        def arrive(layer: int) -> None:
            loaded[layer] = True
            if layer + 1 < self._num_layers:
                self._load_layer(prefix, layer + 1, arrive)
            advance()

        def arrive_all() -> None:
            loaded[:] = [True] * self._num_layers
            advance()

        def advance() -> None:
            layer = state["layer"]
            if not state["computing"] and layer < self._num_layers and loaded[layer]:
                state["computing"] = True
                self._sim.after(layer_s, computed)

        def computed() -> None:
            state["computing"] = False
            state["layer"] += 1
            self._write_layer(new)
            if state["layer"] == self._num_layers:
                self._pause.end()
                ended(Forward(self._sim.now_s - began_s, work_s))
            else:
                advance()

        if self._tier.layerwise:
            self._load_layer(prefix, 0, arrive)
        else:
            self._load(prefix, self._num_layers, arrive_all)

    def _load_layer(self, tokens: int, layer: int, then: Callable[[int], None]) -> None:
        self._load(tokens, 1, lambda: then(layer))

    def _load(self, tokens: int, num_layers: int, then: Callable[[], None]) -> None:
        num_bytes = tokens * self._layer_bytes * num_layers
        if self._control is None:
            self.drive.read(num_bytes, then)
            return
        num_objects = 2 * num_layers * -(-tokens // self._block_tokens)
        left = [2]

        def join() -> None:
            left[0] -= 1
            if not left[0]:
                then()

        self.drive.read(num_bytes, join)
        self._control.start(num_objects, join)

    # ---- writes ------------------------------------------------------------------------------------------------

    def _write_layer(self, new_tokens: int) -> None:
        num_bytes = new_tokens * self._layer_bytes
        if self._tier.writes is Writes.NONE:
            return
        if self._tier.writes is Writes.UNPACED:
            self.drive.write(num_bytes, lambda: None)
            return
        num_blocks = math.ceil(num_bytes / WRITE_BLOCK_BYTES)
        block_bytes = math.ceil(num_bytes / num_blocks)
        num_kept = min(num_blocks, int(BACKLOG_BYTES - self.backlog_bytes) // block_bytes)
        self._backlog.extend([block_bytes] * num_kept)
        self.backlog_bytes += num_kept * block_bytes
        self.dropped_bytes += (num_blocks - num_kept) * block_bytes
        if not self._polls:
            self._polls = True
            self._pump()

    def _pump(self) -> None:
        """What the I/O thread does: ask the gate, write what it allows, come back."""
        num_reads = self.drive.reads.num_flows
        while self._backlog and self._gate.may_write(num_reads=num_reads, num_writes=self.num_writing):
            block_bytes = self._backlog.popleft()
            self.num_writing += 1
            self.drive.write(block_bytes, self._written, block_bytes)
        self._polls = bool(self._backlog)
        if self._polls:
            self._sim.after(POLL_S, self._pump)

    def _written(self, block_bytes: int) -> None:
        self.num_writing -= 1
        self.backlog_bytes -= block_bytes
