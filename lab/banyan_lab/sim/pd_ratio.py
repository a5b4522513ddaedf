# SPDX-License-Identifier: Apache-2.0
"""Which ratios of prefill to decode nodes let every storage NIC run at full speed: on paper, and in the simulator.

With g compute NICs of bandwidth B on a node, a storage NIC of s*B, DRAM of M, P prefill and D decode nodes, and all
storage NICs busy with hits, these must fit (loads over capacity, both in units of B and of all nodes of a side):

    prefill, in:   P s (own buffer -> GPU)  + D s (decode buffer -> GPU)               <= P g
    prefill, out:  P s (own buffer -> GPU)  + P s (GPU -> decode buffer)               <= P g
    decode, in:    P s (from prefill GPUs)  + (P + D) s (own buffer -> GPU)            <= D g
    decode, out:   D s (to prefill GPUs)    + (P + D) s (own buffer -> GPU)            <= D g
    decode, DRAM:  D s (storage) + P s (prefill) + D s (to prefill) + (P + D) s (GPU)  <= D M / B
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from fractions import Fraction

from banyan.routing.policies import DualPath
from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.compute import DecodeModel, PrefillModel, Rates
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.figures import DUALPATH, Figure
from banyan_lab.sim.systems import SYSTEMS, Deployment, Fidelity, Reads, deployment
from banyan_lab.sim.workload import Trajectory

FULL_SHARE = 0.97
"""Of the bandwidth of all storage NICs: reached counts as no bottleneck."""

RATIOS = ((1, 9), (1, 8), (1, 7), (1, 6), (1, 2), (1, 1), (2, 1), (3, 1), (7, 2), (4, 1), (5, 1))
_CONTEXT_TOKENS = 8_000
_NO_CEILING = 1 << 60
_AGENTS_PER_NODE = 64
_FROM_S, _UNTIL_S = 20.0, 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """P/D without a bottleneck, and which resource sets each end."""

    low: Fraction
    high: Fraction
    low_by: str
    high_by: str


def bounds(*, num_gpus: int, storage_ratio: Fraction, dram_ratio: Fraction) -> Bounds:
    """The range for g GPUs on a node, s = storage over compute NIC, M / B = DRAM over compute NIC.

    Raises:
        ValueError: when the prefill side's own traffic exceeds its NICs at any ratio.
    """
    g, s = Fraction(num_gpus), storage_ratio
    if 2 * s > g:
        raise ValueError(f"2 s = {2 * s} exceeds g = {g}: the prefill side's NICs are the bottleneck at any ratio")
    upper = {
        "compute NIC of decode nodes, in": (g - s) / (2 * s),
        "compute NIC of decode nodes, out": (g - 2 * s) / s,
        "DRAM of decode nodes": (dram_ratio / s - 3) / 2,
    }
    by = min(upper, key=lambda name: upper[name])
    return Bounds(s / (g - s), upper[by], "compute NIC of prefill nodes, in", by)


def storage_share(prefill_nodes: int, decode_nodes: int, reads: Reads) -> float:
    """Share of all storage NICs' bandwidth that dual-path loading reaches when GPUs cost nothing."""
    site = _io_only(
        deployment("qwen2-5-32b", prefill_nodes=1, decode_nodes=1),
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
    )
    sim = Simulation()
    cluster = Cluster(sim, site, replace(SYSTEMS["split"], reads=reads), policy=DualPath(beta_tokens=_NO_CEILING))
    chance = sim.chance("contexts")
    num_nodes = prefill_nodes + decode_nodes
    for _ in range(_AGENTS_PER_NODE * num_nodes):
        tokens = round(_CONTEXT_TOKENS * chance.uniform(0.5, 1.5))
        cluster.start(Trajectory(array("i", [tokens] + [1] * 2_000), array("i", [1] * 2_001)), from_turn=1)
    sim.run(until_s=_FROM_S)
    before = _read_bytes(cluster)
    sim.run(until_s=_UNTIL_S)
    cluster.audit()
    full = num_nodes * site.spec.storage_nic_bytes_per_s * (_UNTIL_S - _FROM_S)
    return (_read_bytes(cluster) - before) / full


def _read_bytes(cluster: Cluster) -> float:
    links = [node.storage_in for node in cluster.prefill_nodes + cluster.decode_nodes]
    return sum(link.bytes_started - link.pending_bytes for link in links)


def _io_only(site: Deployment, *, prefill_nodes: int, decode_nodes: int) -> Deployment:
    """The same nodes with GPUs that take no time and memories without end, so that only bandwidth is left."""
    rates = Rates(prefill_flops_per_s=1e30, decode_layer_s=0.0)
    chip = replace(site.spec.gpu, hbm_bytes_per_s=1e30)
    return replace(
        site,
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        spec=replace(site.spec, gpu=chip, dram_buffer_bytes=1e18),
        prefill=PrefillModel(site.model, 1e30),
        decode=DecodeModel(site.model, chip, 1.0, rates),
        prefill_room_bytes=1e18,
        decode_room_bytes=1e18,
        steps_together=False,
        fidelity=Fidelity.LINKS,
    )


def figures() -> list[Figure]:
    """The range on paper, and where the simulated share falls below ``FULL_SHARE``."""
    paper = bounds(num_gpus=8, storage_ratio=Fraction(1), dram_ratio=Fraction(10))
    source = f"{DUALPATH}, range without a bottleneck for g = 8, s = 1"
    pairs = sorted(RATIOS, key=lambda pair: Fraction(*pair))
    rows = [
        Figure(
            name=f"P/D {end}, analytical",
            published=float(value),
            simulated=float(got),
            unit="ratio",
            source=source,
            within=1e-9,
            note=f"set by {by}",
        )
        for end, value, got, by in (
            ("lower end", Fraction(1, 7), paper.low, paper.low_by),
            ("upper end", Fraction(7, 2), paper.high, f"{paper.high_by}; the DRAM bound gives the same"),
        )
    ]
    for reads, within, note in (
        (Reads.EVEN, 1e-9, "reads in proportion to the storage NICs, as the analysis assumes"),
        (Reads.SPLIT, None, "reads as the shipped policy splits them: it sees read queues, not the compute NICs"),
    ):
        shares = {pair: storage_share(*pair, reads) for pair in pairs}
        full = [Fraction(*pair) for pair, share in shares.items() if share >= FULL_SHARE]
        ends = (("lower end", Fraction(1, 7), min(full)), ("upper end", Fraction(7, 2), max(full))) if full else ()
        rows += [
            Figure(
                name=f"P/D {end}, simulated, {reads.value} reads",
                published=float(value),
                simulated=float(got),
                unit="ratio",
                source=source,
                within=within,
                note=f"the outermost ratio tried that reaches {FULL_SHARE:.0%} of the storage bandwidth; {note}",
            )
            for end, value, got in ends
        ]
        rows += [
            Figure(
                name=f"storage bandwidth reached at {p}P{d}D, {reads.value} reads",
                published=None,
                simulated=share,
                unit="share",
                source="analysis in banyan_lab.sim.pd_ratio",
            )
            for (p, d), share in shares.items()
        ]
    return rows
