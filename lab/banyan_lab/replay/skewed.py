# SPDX-License-Identifier: Apache-2.0
"""A generated trace in which one prefix takes most of the traffic: what affinity alone cannot serve evenly."""

from __future__ import annotations

import random
from dataclasses import dataclass

from banyan_lab.replay.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """The shape. Lengths are in blocks of ``block_tokens`` tokens; a prompt is its group's prefix and its own rest.

    ``hot_ratio`` of the sessions begin with the hot prefix; the others share ``num_cold_prefixes`` evenly.
    """

    num_sessions: int = 40
    num_turns: int = 2
    hot_ratio: float = 0.8
    num_cold_prefixes: int = 4
    prefix_blocks: int = 30
    turn_blocks: int = 4
    block_tokens: int = 16
    num_output_tokens: int = 16
    gap_s: float = 0.3
    think_s: float = 1.0


def skewed_trace(shape: Skew, *, seed: int = 0) -> Trace:
    """Sessions arrive ``gap_s`` apart on average (Poisson); each turn adds ``turn_blocks`` of its own."""
    rng = random.Random(seed)
    requests = []
    start_s = 0.0
    next_block = (1 + shape.num_cold_prefixes) * shape.prefix_blocks
    for number in range(shape.num_sessions):
        group = 0 if rng.random() < shape.hot_ratio else 1 + rng.randrange(shape.num_cold_prefixes)
        prefix = (group * shape.prefix_blocks, shape.prefix_blocks)
        for turn in range(shape.num_turns):
            num_own = (turn + 1) * shape.turn_blocks
            requests.append(
                TraceRequest(
                    session=f"s{number}",
                    turn=turn,
                    at_s=start_s + turn * shape.think_s,
                    num_input_tokens=(shape.prefix_blocks + num_own) * shape.block_tokens,
                    num_output_tokens=shape.num_output_tokens,
                    blocks=(prefix, (next_block, num_own)),
                    think_s=shape.think_s if turn else None,
                )
            )
        next_block += shape.num_turns * shape.turn_blocks
        start_s += rng.expovariate(1 / shape.gap_s)
    requests.sort(key=lambda request: request.at_s)
    return Trace("skewed", shape.block_tokens, tuple(requests))
