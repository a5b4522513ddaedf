# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared, as sets of features; and what they run on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from banyan_lab.sim.compute import DecodeModel, PrefillModel, deepseek_rates, kv_room_bytes
from banyan_lab.sim.hardware import NodeSpec, node
from banyan_lab.sim.llms import Llm, llm


class Reads(Enum):
    """Which side reads a request's KV from storage."""

    NOBODY = "nobody"
    """Oracle: KV is where it is needed, at once."""
    PREFILL = "prefill"
    IN_TURN = "in turn"
    """Prefill and decode side alternate."""
    SHORTER_QUEUE = "shorter queue"
    EVEN = "even"
    """Both sides read, in proportion to their storage NICs: what the analysis of the P/D ratio assumes. No system."""
    SPLIT = "split"
    """Both sides read a part each, as servers' do."""


class Placement(Enum):
    """Which policy of ``banyan.routing`` picks the ranks."""

    ROUND_ROBIN = "round robin"
    DUALPATH = "dualpath"


class Fidelity(Enum):
    """How the network between the nodes is modelled."""

    LINKS = "links"
    """Every compute NIC direction and the DRAM of each node is a shared link."""
    UNLOADED = "unloaded"
    """Transfers take their time at full bandwidth and do not meet: right within the P/D range without a bottleneck
    (``banyan_lab.sim.pd_ratio``), and a third of the events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One row of the ablation.

    Attributes:
        layerwise: HBM of the prefill side holds one layer's KV of a request at a time, and loading hides behind
            compute; else all layers, from the start of the read to the end of the hand-over.
        quota_s: attention time that one rank may spend in a pass; None: passes are cut by tokens only.
        pool_bytes: DRAM of each node that is part of one pool of KV in front of storage; 0: there is none.
    """

    title: str
    layerwise: bool
    reads: Reads
    placement: Placement
    quota_s: float | None
    pool_bytes: float = 0.0


QUOTA_S = 0.3
"""Published as the example of a compute quota."""

POOL_BYTES = 1.5e12
"""Of each node for a pool such as Mooncake's, published by DualPath."""

SYSTEMS = {
    "basic": System(title="Basic", layerwise=False, reads=Reads.PREFILL, placement=Placement.ROUND_ROBIN, quota_s=None),
    "layerwise": System(
        title="+ layer-wise prefill",
        layerwise=True,
        reads=Reads.PREFILL,
        placement=Placement.ROUND_ROBIN,
        quota_s=None,
    ),
    "dualpath-unscheduled": System(
        title="+ dual path", layerwise=True, reads=Reads.IN_TURN, placement=Placement.ROUND_ROBIN, quota_s=None
    ),
    "dualpath": System(
        title="+ scheduling (DualPath)",
        layerwise=True,
        reads=Reads.SHORTER_QUEUE,
        placement=Placement.DUALPATH,
        quota_s=QUOTA_S,
    ),
    "split": System(
        title="+ split reads", layerwise=True, reads=Reads.SPLIT, placement=Placement.DUALPATH, quota_s=QUOTA_S
    ),
    "sgl-mc": System(
        title="SGL(MC)",
        layerwise=False,
        reads=Reads.PREFILL,
        placement=Placement.ROUND_ROBIN,
        quota_s=None,
        pool_bytes=POOL_BYTES,
    ),
    "dualpath-pool": System(
        title="DualPath and a pool",
        layerwise=True,
        reads=Reads.SHORTER_QUEUE,
        placement=Placement.DUALPATH,
        quota_s=QUOTA_S,
        pool_bytes=POOL_BYTES,
    ),
    "oracle": System(title="Oracle", layerwise=True, reads=Reads.NOBODY, placement=Placement.DUALPATH, quota_s=QUOTA_S),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on P prefill and D decode nodes, ``num_groups`` times.

    Attributes:
        steps_together: the ranks of a group wait for each other in every layer, as expert parallelism makes them.
    """

    model: Llm
    spec: NodeSpec
    num_groups: int
    prefill_nodes: int
    decode_nodes: int
    prefill: PrefillModel
    decode: DecodeModel
    prefill_room_bytes: float
    decode_room_bytes: float
    steps_together: bool
    pass_tokens: int = 16_384
    fidelity: Fidelity = Fidelity.UNLOADED

    @property
    def title(self) -> str:
        return f"{self.prefill_nodes * self.num_groups}P{self.decode_nodes * self.num_groups}D"

    @property
    def num_nodes(self) -> int:
        return (self.prefill_nodes + self.decode_nodes) * self.num_groups


def deployment(
    model_name: str,
    *,
    prefill_nodes: int,
    decode_nodes: int,
    num_groups: int = 1,
    node_name: str = "hopper",
    fidelity: Fidelity = Fidelity.UNLOADED,
) -> Deployment:
    """``num_groups`` times so many prefill and decode nodes."""
    model, spec, rates = llm(model_name), node(node_name), deepseek_rates()
    decode_gpus = decode_nodes * spec.num_gpus
    return Deployment(
        model=model,
        spec=spec,
        num_groups=num_groups,
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        prefill=PrefillModel(model, rates.prefill_flops_per_s),
        decode=DecodeModel(model, spec.gpu, model.weight_bytes_on(decode_gpus), rates),
        prefill_room_bytes=kv_room_bytes(model, spec.gpu, num_gpus=prefill_nodes * spec.num_gpus),
        decode_room_bytes=kv_room_bytes(model, spec.gpu, num_gpus=decode_gpus),
        steps_together=model.expert_params > 0,
        fidelity=fidelity,
    )
