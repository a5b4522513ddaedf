# SPDX-License-Identifier: Apache-2.0
"""Agent trajectories made from published statistics, and when agents arrive.

Only means were published. What they say together decides the rest:

* Turns times tokens per turn is 1.6 to 1.7 times the total length, so per-turn means are means over trajectories and
  long trajectories have short turns. With turns log-normal, which 420 real coding-agent sessions fit (distance of
  Kolmogorov and Smirnov 0.05, docs/simulator.md), the ratio is exp(sigma^2): that gives sigma = 0.68 to 0.73.
* The mean context is 0.58 to 0.60 of the total, more than the half that equal turns would give: the first prompt is
  16 to 20 % of the total.
* The mean total is 0.85 to 0.87 of the longest: lengths are max * U^(1/a), with a from that mean.

Tokens within a trajectory are split over its turns by exponential weights.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from banyan_lab.sim.hardware import table


class Trajectory(NamedTuple):
    """One agent: tokens that each turn appends to the context, and tokens that the model answers."""

    appends: array[int]
    outputs: array[int]

    @property
    def num_turns(self) -> int:
        return len(self.appends)


@dataclass(frozen=True, slots=True)
class AgentSet:
    """The statistics of one published set of trajectories, in tokens."""

    max_tokens: int
    mean_turns: float
    mean_append_tokens: float
    mean_output_tokens: float
    mean_total_tokens: float
    mean_context_tokens: float

    @property
    def turns_sigma(self) -> float:
        per_turn = self.mean_append_tokens + self.mean_output_tokens
        return math.sqrt(math.log(per_turn * self.mean_turns / self.mean_total_tokens))

    @property
    def first_prompt_share(self) -> float:
        return 2 * self.mean_context_tokens / self.mean_total_tokens - 1

    @property
    def output_share(self) -> float:
        return self.mean_output_tokens / (self.mean_append_tokens + self.mean_output_tokens)

    def scaled(self, *, append: float = 1.0, output: float = 1.0) -> AgentSet:
        """The same set with other turns: the totals change with them."""
        per_turn = self.mean_append_tokens + self.mean_output_tokens
        factor = (self.mean_append_tokens * append + self.mean_output_tokens * output) / per_turn
        return AgentSet(
            round(self.max_tokens * factor),
            self.mean_turns,
            self.mean_append_tokens * append,
            self.mean_output_tokens * output,
            self.mean_total_tokens * factor,
            self.mean_context_tokens * factor,
        )

    def lengthened(self, *, append: float = 1.0, output: float = 1.0) -> AgentSet:
        """The same context lengths from other turns: the totals stay, and the number of turns gives way."""
        grown = self.scaled(append=append, output=output)
        factor = grown.mean_total_tokens / self.mean_total_tokens
        return replace(
            self,
            mean_turns=self.mean_turns / factor,
            mean_append_tokens=grown.mean_append_tokens,
            mean_output_tokens=grown.mean_output_tokens,
        )

    def draw(self, chance: random.Random) -> Trajectory:
        """One trajectory."""
        fill = self.mean_total_tokens / self.max_tokens
        total = self.max_tokens * chance.random() ** ((1 - fill) / fill)
        sigma = self.turns_sigma
        turns = max(1, round(math.exp(chance.gauss(math.log(self.mean_turns) - sigma**2 / 2, sigma))))
        first = total * self.first_prompt_share
        appended = total * (1 - self.output_share) - first
        appends = array("i", (round(first), *_split(appended, turns - 1, chance)))
        return Trajectory(appends, array("i", _split(total * self.output_share, turns, chance)))

    def trajectories(self, number: int, chance: random.Random) -> Iterator[Trajectory]:
        return (self.draw(chance) for _ in range(number))


def _split(total: float, parts: int, chance: random.Random) -> list[int]:
    """``total`` tokens over so many turns by exponential weights; no turn is empty."""
    if parts < 1:
        return []
    draw, log = chance.random, math.log
    weights = [-log(1.0 - draw()) for _ in range(parts)]
    unit = total / sum(weights)
    return [int(weight * unit) + 1 for weight in weights]


def agent_set(name: str) -> AgentSet:
    """Raises KeyError for a set that ``data/workloads.toml`` does not have."""
    return AgentSet(**table("workloads")[name])


def poisson_arrivals(rate_per_s: float, until_s: float, chance: random.Random) -> list[float]:
    """When agents arrive."""
    times, now_s = [], 0.0
    while (now_s := now_s + chance.expovariate(rate_per_s)) < until_s:
        times.append(now_s)
    return times
