# SPDX-License-Identifier: Apache-2.0
"""Coding agents as the Elastic P2P report describes its trace: sessions that grow, behind prompts that others share.

Only statistics were published. Assumed: lengths are log-normal, with the spread that the published mean and median of
the whole trace give; the turns of a session are geometric and ``THINK_S`` apart. All first prompts have one front in
common, as much of each as the published hit rate of an infinite cache leaves to other sessions: with several fronts
that rate does not come back.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from banyan_lab.replay import Trace, TraceRequest

BLOCK_TOKENS = 256
MAX_TOKENS = 200_000
"""Of a prompt and its answer, as the report's servers allow."""
THINK_S = 30.0
INPUT_SIGMA = math.sqrt(2 * math.log(33_600 / 20_000))
OUTPUT_MEDIAN, OUTPUT_SIGMA = 80, math.sqrt(2 * math.log(445 / 80))
GROWTH_TOKENS = 2_300
"""Of a session's context with each turn: 2.0 to 2.6 thousand are published."""


@dataclass(frozen=True, slots=True)
class Coders:
    """``reusable_share`` is the part of all prompt tokens that an infinite cache has; ``span_s`` is for arrivals."""

    num_requests: int
    num_sessions: int
    mean_input_tokens: float
    reusable_share: float
    span_s: float

    @property
    def mean_turns(self) -> float:
        return self.num_requests / self.num_sessions

    @property
    def shared_share(self) -> float:
        """Of a first prompt: what its session's own turns do not explain of the reuse."""
        own = (1 - 1 / self.mean_turns) * (1 - GROWTH_TOKENS / self.mean_input_tokens)
        return min(1.0, max(0.0, (self.reusable_share - own) * self.mean_turns))

    def trace(self, seed: int = 0) -> Trace:
        """The same seed gives the same trace."""
        chance = random.Random(f"{seed}/coders")
        requests: list[TraceRequest] = []
        next_block = MAX_TOKENS // BLOCK_TOKENS
        for number in range(self.num_sessions):
            start_s, turn, more = chance.uniform(0, self.span_s), 0, True
            median = self.mean_input_tokens * math.exp(-(INPUT_SIGMA**2) / 2)
            tokens = chance.lognormvariate(math.log(median), INPUT_SIGMA)
            front = int(tokens * self.shared_share) // BLOCK_TOKENS
            while more and tokens < MAX_TOKENS:
                own = int(tokens) // BLOCK_TOKENS - front
                requests.append(
                    TraceRequest(
                        session=f"s{number}",
                        turn=turn,
                        at_s=start_s + turn * THINK_S,
                        num_input_tokens=int(tokens),
                        num_output_tokens=_output_tokens(chance),
                        blocks=((0, front), (next_block, own)),
                        think_s=THINK_S if turn else None,
                    )
                )
                turn, tokens = turn + 1, tokens + chance.expovariate(1 / GROWTH_TOKENS)
                more = chance.random() < 1 - 1 / self.mean_turns
            next_block += MAX_TOKENS // BLOCK_TOKENS
        return Trace("coders", BLOCK_TOKENS, ()).of(requests)


def _output_tokens(chance: random.Random) -> int:
    return min(8_192, max(2, round(chance.lognormvariate(math.log(OUTPUT_MEDIAN), OUTPUT_SIGMA))))
