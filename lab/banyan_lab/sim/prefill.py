# SPDX-License-Identifier: Apache-2.0
"""The prefill side: ranks that fill their batches, and groups of ranks that step together.

Expert parallelism makes the ranks of a group wait for each other in every layer: a pass takes as long as its slowest
rank's attention, plus the experts' work, which spreads over all ranks. So imbalance costs, and the policies are worth
something.

A group: idle -> in a pass -> idle or in the next pass. A pass begins as soon as any rank of an idle group has work.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from banyan.routing import RankState
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.nodes import Join, Network, Node
from banyan_lab.sim.resources import Room
from banyan_lab.sim.systems import Deployment, Fidelity, Reads, System
from banyan_lab.sim.turn import Turn

Piece = tuple[Turn, int, int]
"""A turn in a pass: the tokens that it computes, and those that lie before them."""


class PrefillRank:
    """One GPU of the prefill side. Loads are those that ``banyan.routing`` wants to see."""

    __slots__ = (
        "group",
        "node",
        "num_waiting",
        "ongoing_tokens",
        "pending_tokens",
        "place",
        "ready",
        "room",
        "state",
    )

    def __init__(self, sim: Simulation, group: PrefillGroup, node: Node, room_bytes: float) -> None:
        self.group = group
        self.node = node
        self.place = group.add(self)
        self.state: RankState | None = None
        self.room = Room(sim, f"{node.name}.{self.place}.hbm", room_bytes)
        self.ready: deque[Turn] = deque()
        self.ongoing_tokens = 0
        self.pending_tokens = 0
        self.num_waiting = 0

    def assign(self, turn: Turn) -> None:
        """The turn counts for this rank from its placement on."""
        self.ongoing_tokens += turn.prompt_tokens
        self.group.ongoing_tokens += turn.prompt_tokens
        self.pending_tokens += turn.new_tokens
        self.num_waiting += 1

    def release(self, turn: Turn) -> None:
        """The turn has left for the decode side."""
        self.ongoing_tokens -= turn.prompt_tokens
        self.group.ongoing_tokens -= turn.prompt_tokens
        self.num_waiting -= 1


@dataclass(slots=True)
class Balance:
    """Attention time of the ranks of a group in each pass: when it began, the slowest, and the mean."""

    began_s: array[float] = field(default_factory=lambda: array("d"))
    slowest_s: array[float] = field(default_factory=lambda: array("d"))
    mean_s: array[float] = field(default_factory=lambda: array("d"))

    def note(self, now_s: float, slowest_s: float, mean_s: float) -> None:
        self.began_s.append(now_s)
        self.slowest_s.append(slowest_s)
        self.mean_s.append(mean_s)

    def max_over_mean(self, until_s: float) -> float:
        """Of the passes that began until then; 1 is perfect."""
        number = bisect_right(self.began_s, until_s)
        mean_s = sum(self.mean_s[:number])
        return sum(self.slowest_s[:number]) / mean_s if mean_s else 1.0


class PrefillGroup:
    """Ranks in lockstep."""

    __slots__ = (
        "_in_pass",
        "_network",
        "_prefilled",
        "_select",
        "_sim",
        "_site",
        "_system",
        "balance",
        "busy_s",
        "nodes",
        "ongoing_tokens",
        "ranks",
        "read_queue_tokens",
        "state",
    )

    def __init__(
        self,
        sim: Simulation,
        site: Deployment,
        network: Network,
        system: System,
        select: Callable[[PrefillRank], list[Piece]],
        prefilled: Callable[[Turn], None],
    ) -> None:
        """``select`` takes a rank's next batch off its queue; ``prefilled`` runs when a turn's last piece is done."""
        self._sim = sim
        self._site = site
        self._network = network
        self._select = select
        self._prefilled = prefilled
        self._in_pass = False
        self._system = system
        self.ranks: list[PrefillRank] = []
        self.nodes: list[Node] = []
        self.ongoing_tokens = 0
        self.read_queue_tokens = 0
        self.state: RankState | None = None
        self.balance = Balance()
        self.busy_s = 0.0

    def add(self, rank: PrefillRank) -> int:
        """A further rank; its place in the group."""
        self.ranks.append(rank)
        if rank.node not in self.nodes:
            self.nodes.append(rank.node)
        return len(self.ranks) - 1

    def enqueue(self, turn: Turn) -> None:
        """The turn's KV is at hand; it joins the next pass that has room for it."""
        turn.ready_s = self._sim.now_s
        turn.reading_s = min(turn.reading_s, turn.ready_s)
        turn.prefill_rank.ready.append(turn)
        if not self._in_pass:
            self._in_pass = True
            # At the end of this moment, so that turns which become ready together share a pass.
            self._sim.after(0.0, self._begin)

    def _begin(self) -> None:
        cost = self._site.prefill
        pieces: list[Piece] = []
        slowest_s = sum_s = load_s = new_tokens = 0.0
        streams = self._system.layerwise and self._system.reads is not Reads.NOBODY
        nic_bytes_per_s, kv_bytes = self._site.spec.compute_nic_bytes_per_s, self._site.model.kv_bytes_per_token
        for rank in self.ranks:
            if not rank.ready:
                continue
            batch = self._select(rank)
            attention_s = loaded_tokens = 0.0
            for turn, extend, prefix in batch:
                attention_s += cost.attention_s(new_tokens=extend, cached_tokens=prefix)
                new_tokens += extend
                if prefix == turn.cached_tokens:
                    loaded_tokens += prefix
                    turn.computing_s = self._sim.now_s
            pieces += batch
            sum_s += attention_s
            slowest_s = max(slowest_s, attention_s)
            if streams:
                load_s = max(load_s, loaded_tokens * kv_bytes / nic_bytes_per_s)
        if not pieces:
            self._in_pass = False
            return
        compute_s = slowest_s + cost.linear_s(new_tokens) / len(self.ranks)
        self.balance.note(self._sim.now_s, slowest_s, sum_s / len(self.ranks))
        # A pass launches as many kernels and collectives as a decode step does.
        pass_s = max(compute_s, load_s, self._site.decode.layer_s * self._site.model.num_layers)
        self.busy_s += pass_s
        if self._site.fidelity is Fidelity.LINKS and streams:
            self._stream(pieces, pass_s)
        else:
            self._sim.after(pass_s, self._end, pieces)

    def _stream(self, pieces: list[Piece], pass_s: float) -> None:
        """Layer by layer: the KV comes in while earlier layers compute, and goes out to the decode side behind them."""
        kv_bytes = self._site.model.kv_bytes_per_token
        moves = []
        for turn, extend, prefix in pieces:
            first = prefix == turn.cached_tokens
            from_decode = turn.decode_side_tokens if first else 0
            from_prefill = turn.cached_tokens - from_decode if first else 0
            moves.append((turn, from_prefill * kv_bytes, from_decode * kv_bytes, extend * kv_bytes))
        join = Join(1 + 3 * len(moves), self._end, pieces)
        self._sim.after(pass_s, join)
        for turn, near_bytes, far_bytes, new_bytes in moves:
            near, far = turn.prefill_rank.node, turn.decode_rank.node
            self._network.load(near, near_bytes, join)
            self._network.send_to_gpu(far, near, far_bytes, join)
            self._network.send_to_dram(near, far, near_bytes + new_bytes, join)

    def _end(self, pieces: list[Piece]) -> None:
        self._in_pass = False
        for turn, extend, _ in pieces:
            turn.left_tokens -= extend
            turn.prefill_rank.pending_tokens -= extend
            if turn.left_tokens == 0:
                turn.prefilled_s = self._sim.now_s
                self._prefilled(turn)
        if any(rank.ready for rank in self.ranks) and not self._in_pass:
            self._in_pass = True
            self._sim.after(0.0, self._begin)
