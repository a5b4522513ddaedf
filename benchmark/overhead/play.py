# SPDX-License-Identifier: Apache-2.0
"""One round of a case against one server: what its clients saw, and what its processes and Banyan's hooks took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from banyan_lab.bench.hooks import STEP, Costs
from benchmark.client import NativeClient, open_session
from benchmark.engine import Engine
from benchmark.overhead.cases import FILL, Case, prompts
from benchmark.records import Answer
from benchmark.servers import Server

TIMEOUT_S = 900.0
PROCESSES = {"scheduler": "scheduler", "dispatcher": "data_parallel_controller"}
"""What their titles have in them."""

EACH_STEP = (
    STEP,
    "layer_wait.set_consumer",
    "answers.50-cached-tokens",
    "placement.44-load-on-arrival",
    "planner.34-prefill-adder",
)
"""Hooks that are called in each step, or in each step for each stream. What comes before each layer,
``layer_wait.wait_until``, is timed by nobody."""

ASKED = "observe.51-server-info"

SETTLE_S = 0.3
"""Between a round and the look at what it took: what is told of a request's end comes after its answer."""


class Failed(RuntimeError):
    """A request got no answer, or not all of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """``step_s``: the median over answers of the time of a token behind the first; ``cpu_us``: of the processes of
    each kind, for a request; ``costs``: Banyan's own, of all requests."""

    requests_per_s: float
    ttft_s: float
    step_s: float | None
    cpu_us: dict[str, float]
    num_requests: int
    costs: Costs

    @property
    def scheduler_us(self) -> float:
        """Of the scheduler's thread for a request, the steps in which it ran included; not what it tells here."""
        asked_us = self.costs.hooks[ASKED].own_us if ASKED in self.costs.hooks else 0
        return (self.costs.control_us - asked_us) / self.num_requests

    @property
    def dispatcher_us(self) -> float:
        return self.costs.dispatch_us / self.num_requests

    @property
    def step_us(self) -> float:
        """Of the scheduler's thread for a step, whatever its requests began or ended with."""
        own_us = sum(self.costs.hooks[name].own_us for name in EACH_STEP if name in self.costs.hooks)
        return own_us / self.costs.num_steps if self.costs.num_steps else 0.0


class Player:
    """Asks one server. ``ranks``: how many it has; each gets as many requests."""

    def __init__(self, server: Server, ranks: int, seed: int) -> None:
        self._server, self._ranks, self._seed = server, ranks, seed
        self._engine = Engine(server.url)

    def fill(self) -> None:
        """Fill the trees of all ranks."""
        self.play(FILL)

    def play(self, case: Case) -> Round:
        """Ask, with prompts that were never asked before."""
        self._seed += 1
        asked = prompts(self._seed, case.num_requests * self._ranks, case.prompt_tokens)
        before = self._costs()
        answers, took_s = asyncio.run(self._ask(asked, case))
        time.sleep(SETTLE_S)
        return _round(answers, took_s, before, self._costs())

    async def _ask(self, asked: Sequence[Sequence[int]], case: Case) -> tuple[list[Answer], float]:
        gate = asyncio.Semaphore(case.num_at_once * self._ranks)
        async with open_session(TIMEOUT_S) as session:
            client = NativeClient(session, self._server.url)

            async def one(prompt: Sequence[int]) -> Answer:
                async with gate:
                    return await client.answer((), prompt, case.output_tokens)

            began_s = time.perf_counter()
            answers = await asyncio.gather(*map(one, asked))
            took_s = time.perf_counter() - began_s
        for answer in answers:
            if answer.error or len(answer.output_ids) != case.output_tokens:
                raise Failed(f"{case.name}: {answer.error or f'{len(answer.output_ids)} tokens came'}")
        return list(answers), took_s

    def _costs(self) -> tuple[Costs, dict[str, float]]:
        cpu_s = self._server.cpu_s()
        processes = {
            kind: 1e6 * sum(used_s for title, used_s in cpu_s.items() if mark in title)
            for kind, mark in PROCESSES.items()
        }
        return Costs.of(self._engine.server_info()), processes


def step_s(answer: Answer) -> float | None:
    """The time from an answer's first token to its end, by the tokens that came then; None without such tokens.

    The gaps of ``answer.itl_s`` would not do: events that come in one read are timed as they are parsed, microseconds
    apart, so the median gap of a client that gets too little of a core is near 0.
    """
    num_behind = len(answer.output_ids) - 1
    if answer.ttft_s is None or num_behind < 1:
        return None
    return (answer.latency_s - answer.ttft_s) / num_behind


def _round(
    answers: Sequence[Answer],
    took_s: float,
    before: tuple[Costs, dict[str, float]],
    after: tuple[Costs, dict[str, float]],
) -> Round:
    num, costs = len(answers), after[0].since(before[0])
    steps_s = [step for answer in answers if (step := step_s(answer)) is not None]
    return Round(
        requests_per_s=num / took_s,
        ttft_s=median(answer.ttft_s for answer in answers if answer.ttft_s is not None),
        step_s=median(steps_s) if steps_s else None,
        cpu_us={kind: (after[1][kind] - before[1][kind]) / num for kind in PROCESSES},
        num_requests=num,
        costs=costs,
    )
