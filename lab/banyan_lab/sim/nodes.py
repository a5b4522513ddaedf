# SPDX-License-Identifier: Apache-2.0
"""A server as resources, and how bytes cross it under each fidelity.

Names of directions are seen from the node: ``in`` towards its memories, ``out`` away from them. A copy between the
node's own DRAM and a GPU goes through the GPU's compute NIC (CNIC-centric traffic) and uses both of its directions.
"""

from __future__ import annotations

from banyan_lab.sim.engine import Action, Simulation
from banyan_lab.sim.hardware import NodeSpec
from banyan_lab.sim.resources import Link, Room
from banyan_lab.sim.systems import Fidelity


class Node:
    """One server. The compute NICs of its GPUs are one link for each direction, as wide as all of them."""

    __slots__ = ("buffer", "compute_in", "compute_out", "dram", "name", "read_queue_tokens", "spec", "storage_in")

    def __init__(self, sim: Simulation, spec: NodeSpec, name: str) -> None:
        self.name = name
        self.spec = spec
        self.storage_in = Link(sim, f"{name}.storage_in", spec.storage_nic_bytes_per_s)
        compute_bytes_per_s = spec.compute_nic_bytes_per_s * spec.num_gpus
        self.compute_in = Link(sim, f"{name}.compute_in", compute_bytes_per_s)
        self.compute_out = Link(sim, f"{name}.compute_out", compute_bytes_per_s)
        self.dram = Link(sim, f"{name}.dram", spec.dram_bytes_per_s)
        self.buffer = Room(sim, f"{name}.buffer", spec.dram_buffer_bytes)
        self.read_queue_tokens = 0

    @property
    def links(self) -> tuple[Link, ...]:
        return self.storage_in, self.compute_in, self.compute_out, self.dram

    def audit(self) -> None:
        for link in self.links:
            link.audit()
        if self.read_queue_tokens < 0:
            raise AssertionError(f"{self.name}: {self.read_queue_tokens} tokens in the read queue")


class Join:
    """Runs ``then(*args)`` when so many things have ended."""

    __slots__ = ("_args", "_left", "_then")

    def __init__(self, number: int, then: Action, *args: object) -> None:
        self._left = number
        self._then = then
        self._args = args

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then(*self._args)


class Network:
    """Moves bytes between the memories of nodes, over every resource that they cross at once."""

    __slots__ = ("_fidelity", "_sim")

    def __init__(self, sim: Simulation, fidelity: Fidelity) -> None:
        self._sim = sim
        self._fidelity = fidelity

    def load(self, node: Node, num_bytes: float, then: Action, *args: object) -> None:
        """From the node's DRAM to one of its GPUs: its NIC in both directions, and one read of DRAM."""
        self._move((node.compute_out, node.compute_in, node.dram), node, num_bytes, then, *args)

    def send_to_gpu(self, source: Node, target: Node, num_bytes: float, then: Action, *args: object) -> None:
        """From a node's DRAM into a GPU of another node."""
        self._move((source.dram, source.compute_out, target.compute_in), source, num_bytes, then, *args)

    def send_to_dram(self, source: Node, target: Node, num_bytes: float, then: Action, *args: object) -> None:
        """From a GPU into the DRAM of another node."""
        self._move((source.compute_out, target.compute_in, target.dram), source, num_bytes, then, *args)

    def _move(self, links: tuple[Link, ...], node: Node, num_bytes: float, then: Action, *args: object) -> None:
        if self._fidelity is Fidelity.UNLOADED:
            self._sim.after(num_bytes / node.spec.compute_nic_bytes_per_s, then, *args)
            return
        join = Join(len(links), then, *args)
        for link in links:
            link.start(num_bytes, join)
