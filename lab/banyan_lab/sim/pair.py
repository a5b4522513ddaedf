# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode server and their stores: how long requests for one token take whose prefix only the stores
have.

Who reads what is the router's own decision (``banyan.routing.reads``), from the queues and rates that it would see.
Each side's store is a link that its reads share; what the decode side has read then takes the way back. The forward
begins when all is there: of such a prompt only the last tokens are computed, which hides no read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from banyan.routing.reads import DETOUR_S, ReadQueue, decode_part
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.nodes import Join
from banyan_lab.sim.resources import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRates:
    """What was measured on a pair. ``without_reads_s``: a request whose whole prefix the prefill server's pool has;
    ``detour_s``: the way through the decode server beside its read."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    without_reads_s: float
    detour_s: float = DETOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request: when it comes, how much of its prompt the stores have, and whether the decode side may read."""

    at_s: float
    stored_tokens: int
    has_dual_path: bool


class _Side:
    """A server's store, and what it still has to read."""

    def __init__(self, sim: Simulation, name: str, tokens_per_s: float) -> None:
        self.link = Link(sim, name, tokens_per_s)
        self.rate = tokens_per_s
        self.num_tokens = 0

    @property
    def queue(self) -> ReadQueue:
        return ReadQueue(self.num_tokens, self.rate)


def times_s(asked: Sequence[Asked], rates: PairRates) -> list[float]:
    """How long each request takes."""
    sim = Simulation()
    prefill = _Side(sim, "prefill", rates.prefill_tokens_per_s)
    decode = _Side(sim, "decode", rates.decode_tokens_per_s)
    ended_s = [0.0] * len(asked)

    def read(side: _Side, num_tokens: int, delay_s: float, then: Join) -> None:
        def was_read() -> None:
            side.num_tokens -= num_tokens
            sim.after(delay_s, then)

        side.num_tokens += num_tokens
        side.link.start(num_tokens, was_read)

    def end(number: int) -> None:
        ended_s[number] = sim.now_s

    def arrive(number: int, one: Asked) -> None:
        part = 0
        if one.has_dual_path:
            part = decode_part(one.stored_tokens, prefill=prefill.queue, decode=decode.queue)
        all_read = Join(2, partial(sim.after, rates.without_reads_s, end, number))
        read(prefill, one.stored_tokens - part, 0.0, all_read)
        read(decode, part, rates.detour_s if part else 0.0, all_read)

    for number, one in enumerate(asked):
        sim.at(one.at_s, arrive, number, one)
    sim.run()
    for side in (prefill, decode):
        side.link.audit()
    return [end_s - one.at_s for end_s, one in zip(ended_s, asked, strict=True)]
