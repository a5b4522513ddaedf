# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode nodes that play agents: the life of a turn, from submission to its last token.

Invariants
  1. A turn holds what it took (buffer, HBM, places in loads) until the step that gives it back, and nothing after
     ``_decoded``; when no turn is under way, every room is empty and every load is zero (``audit``).
  2. Bytes that are read from storage are those that the prefill side waits for: nothing computes on KV that has not
     arrived.

With layer-wise prefill the KV waits in the DRAM buffer of the node that read it; without, in HBM, where all layers of
it stay from the start of the read until the hand-over. What each turn adds is written back by the decode side, through
the other direction of its storage NIC; that is a fiftieth of what is read, and is counted, not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from banyan.routing.policies import DualPath
from banyan_lab.sim.batching import attention_cost, by_quota, by_tokens
from banyan_lab.sim.decode import DecodeGroup, DecodeRank
from banyan_lab.sim.dram_pool import DramPool
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.nodes import Network, Node
from banyan_lab.sim.placement import ReadSides, places
from banyan_lab.sim.prefill import PrefillGroup, PrefillRank
from banyan_lab.sim.resources import UnbalancedBooks
from banyan_lab.sim.systems import Deployment, Reads, System
from banyan_lab.sim.turn import Agent, Turn
from banyan_lab.sim.workload import Trajectory


class Cluster:
    """One system on one deployment. ``on_turn`` sees every finished turn; the agent goes on by itself."""

    def __init__(
        self,
        sim: Simulation,
        site: Deployment,
        system: System,
        *,
        on_turn: Callable[[Turn, float], None] = lambda turn, now_s: None,
        policy: DualPath | None = None,
    ) -> None:
        self.sim = sim
        self.site = site
        self.system = system
        self.network = Network(sim, site.fidelity)
        self.prefill_nodes: list[Node] = []
        self.decode_nodes: list[Node] = []
        self.prefill_groups: list[PrefillGroup] = []
        self.decode_groups: list[DecodeGroup] = []
        self.num_agents = 0
        self.num_turns = 0
        self.num_under_way = 0
        self.written_bytes = 0.0
        self.pool = DramPool(system.pool_bytes * site.num_nodes, site.model.kv_bytes_per_token)
        self._kv_bytes = site.model.kv_bytes_per_token
        self._on_turn = on_turn
        self._held: deque[Turn] = deque()
        self._waiting: dict[int, Turn] = {}
        self._sides = ReadSides(
            system.reads,
            even_share=site.decode_nodes / (site.prefill_nodes + site.decode_nodes),
            tokens_per_s=site.spec.storage_nic_bytes_per_s / self._kv_bytes,
        )
        self._build()
        self._places = places(
            system.placement,
            self.prefill_groups,
            self.decode_groups,
            policy=policy or DualPath(),
            kv_bytes_per_token=self._kv_bytes,
        )

    def _build(self) -> None:
        site, sim = self.site, self.sim
        if self.system.quota_s is None:
            select = by_tokens(site.pass_tokens)
        else:
            select = by_quota(attention_cost(site.prefill), self.system.quota_s * 1e6, site.pass_tokens)
        for _ in range(site.num_groups):
            near: list[PrefillRank] = []
            for node in self._add_nodes(self.prefill_nodes, "p", site.prefill_nodes):
                for _ in range(site.spec.num_gpus):
                    if not near or not site.steps_together:
                        self.prefill_groups.append(
                            PrefillGroup(sim, site, self.network, self.system, select, self._prefilled)
                        )
                    near.append(PrefillRank(sim, self.prefill_groups[-1], node, site.prefill_room_bytes))
            far: list[DecodeRank] = []
            for node in self._add_nodes(self.decode_nodes, "d", site.decode_nodes):
                for _ in range(site.spec.num_gpus):
                    if not far or not site.steps_together:
                        self.decode_groups.append(DecodeGroup(sim, site.decode, self._decoded))
                    far.append(DecodeRank(sim, self.decode_groups[-1], node, site.decode_room_bytes))

    def _add_nodes(self, nodes: list[Node], letter: str, number: int) -> list[Node]:
        added = [Node(self.sim, self.site.spec, f"{letter}{len(nodes) + i}") for i in range(number)]
        nodes += added
        return added

    # ---- submit and place --------------------------------------------------------------------------------------

    def start(self, trajectory: Trajectory, from_turn: int = 0) -> None:
        """An agent begins now, or goes on from a later turn whose context lies in storage."""
        agent = Agent(trajectory, self.num_agents)
        self.num_agents += 1
        agent.next_turn = from_turn
        agent.context_tokens = sum(trajectory.appends[:from_turn]) + sum(trajectory.outputs[:from_turn])
        self._submit(agent)

    def waiting_turns(self) -> list[Turn]:
        """Turns without a first token."""
        return list(self._waiting.values())

    def _submit(self, agent: Agent) -> None:
        turn = Turn(agent, self.num_turns, self.sim.now_s)
        self.num_turns += 1
        self.num_under_way += 1
        self._waiting[turn.number] = turn
        self._held.append(turn)
        if len(self._held) == 1:
            self._place_held()

    def _place_held(self) -> None:
        while self._held:
            picked = self._places.pick(self._held[0])
            if picked is None:
                return
            turn = self._held.popleft()
            turn.placed_s = self.sim.now_s
            turn.prefill_rank, turn.decode_rank = picked
            turn.prefill_rank.assign(turn)
            turn.decode_rank.assign(turn)
            self._load(turn)

    # ---- read --------------------------------------------------------------------------------------------------

    def _load(self, turn: Turn) -> None:
        if self.system.reads is Reads.NOBODY:
            turn.prefill_rank.group.enqueue(turn)
            return
        turn.pooled_tokens = self.pool.held_tokens(turn)
        far_tokens = turn.decode_side_tokens = self._sides.decode_tokens(turn)
        near, far = turn.prefill_rank.node, turn.decode_rank.node
        near_tokens = turn.stored_tokens - far_tokens
        near.read_queue_tokens += near_tokens
        turn.prefill_rank.group.read_queue_tokens += near_tokens
        far.read_queue_tokens += far_tokens
        if not self.system.layerwise:
            # The prompt's KV is in HBM as a whole, what is loaded and what is computed.
            turn.num_reads_left = 1
            turn.prefill_rank.room.take(turn.prompt_tokens * self._kv_bytes, self._read, turn, near, near_tokens)
            return
        turn.num_reads_left = (near_tokens > 0) + (far_tokens > 0)
        for node, tokens in ((near, near_tokens), (far, far_tokens)):
            if tokens:
                node.buffer.take(tokens * self._kv_bytes, self._read, turn, node, tokens)
        if not turn.num_reads_left:
            turn.prefill_rank.group.enqueue(turn)

    def _read(self, turn: Turn, node: Node, tokens: int) -> None:
        turn.reading_s = self.sim.now_s
        node.storage_in.start(tokens * self._kv_bytes, self._was_read, turn, node, tokens)

    def _was_read(self, turn: Turn, node: Node, tokens: int) -> None:
        node.read_queue_tokens -= tokens
        if node is turn.prefill_rank.node:
            turn.prefill_rank.group.read_queue_tokens -= tokens
        turn.num_reads_left -= 1
        if turn.num_reads_left:
            return
        enqueue = turn.prefill_rank.group.enqueue
        if self.system.layerwise:
            enqueue(turn)
        else:
            # What the pool had comes over the same NIC as what was read.
            self.network.load(node, turn.cached_tokens * self._kv_bytes, enqueue, turn)

    # ---- prefill and hand over ---------------------------------------------------------------------------------

    def _prefilled(self, turn: Turn) -> None:
        del self._waiting[turn.number]
        rank = turn.prefill_rank
        if self.system.reads is Reads.NOBODY:
            rank.release(turn)
            turn.decode_rank.room.take(self._decode_bytes(turn), turn.decode_rank.group.join, turn)
        elif self.system.layerwise:
            # Layers were handed over while later ones were computed.
            near_tokens = turn.stored_tokens - turn.decode_side_tokens
            if near_tokens:
                rank.node.buffer.give(near_tokens * self._kv_bytes)
            rank.release(turn)
            turn.decode_rank.room.take(self._decode_bytes(turn), self._load_decode, turn)
        else:
            num_bytes = turn.prompt_tokens * self._kv_bytes
            self.network.send_to_dram(rank.node, turn.decode_rank.node, num_bytes, self._handed_over, turn)
        self._place_held()

    def _handed_over(self, turn: Turn) -> None:
        turn.prefill_rank.room.give(turn.prompt_tokens * self._kv_bytes)
        turn.prefill_rank.release(turn)
        turn.decode_rank.room.take(self._decode_bytes(turn), self._load_decode, turn)

    def _decode_bytes(self, turn: Turn) -> float:
        return (turn.prompt_tokens + turn.output_tokens) * self._kv_bytes

    def _load_decode(self, turn: Turn) -> None:
        num_bytes = turn.prompt_tokens * self._kv_bytes
        self.network.load(turn.decode_rank.node, num_bytes, self._begin_decode, turn)

    def _begin_decode(self, turn: Turn) -> None:
        if turn.decode_side_tokens:
            turn.decode_rank.node.buffer.give(turn.decode_side_tokens * self._kv_bytes)
        turn.decode_rank.group.join(turn)

    # ---- decode and go on --------------------------------------------------------------------------------------

    def _decoded(self, turn: Turn) -> None:
        turn.decode_rank.room.give(self._decode_bytes(turn))
        turn.decode_rank.release(turn)
        self.written_bytes += (turn.new_tokens + turn.output_tokens) * self._kv_bytes
        self.num_under_way -= 1
        self.pool.keep(turn)
        self._on_turn(turn, self.sim.now_s)
        agent = turn.agent
        agent.context_tokens += turn.new_tokens + turn.output_tokens
        agent.next_turn += 1
        if agent.next_turn < agent.trajectory.num_turns:
            self._submit(agent)

    def audit(self) -> None:
        """Check every book, and that an idle cluster holds nothing.

        Raises:
            UnbalancedBooks: when something was lost or kept.
        """
        for node in self.prefill_nodes + self.decode_nodes:
            node.audit()
        if self.num_under_way:
            return
        ranks: list[PrefillRank | DecodeRank] = [rank for group in self.prefill_groups for rank in group.ranks]
        ranks += [rank for group in self.decode_groups for rank in group.ranks]
        rooms = [node.buffer for node in self.prefill_nodes + self.decode_nodes] + [rank.room for rank in ranks]
        loads = [rank.ongoing_tokens for rank in ranks] + [group.ongoing_tokens for group in self.prefill_groups]
        loads += [group.read_queue_tokens for group in self.prefill_groups]
        left = [room.name for room in rooms if room.held > 1 or room.num_waiting]
        if left or any(loads) or self._held:
            raise UnbalancedBooks(f"idle, but {left} hold bytes and loads are {sum(loads)} tokens")
