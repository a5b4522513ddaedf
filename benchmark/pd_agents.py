# SPDX-License-Identifier: Apache-2.0
"""What it is worth for agents that a decode server reads for its prefill server.

    python -m benchmark.pd --dual agents

The pair of `pd_dual` with the prefill server's reads limited. Agents go through some turns each, all at once: a prompt,
an answer, and the next turn, whose prompt is the one before with its answer and what the agent adds. Pools and
arenas hold a few of them, so that a turn's prefix is mostly in the store alone. Agents of one kind use the router with
the dual path, those of the other the router without; the kinds take turns, with prompts of their own each time. There
are two loads. Hurried agents ask at once when they were answered: who is answered sooner asks more in the same time.
Paced ones ask at given times, so that both routers see one and the same rate of requests.

* `agents_jct_ratio`: how long a hurried agent takes from its first prompt to its last token, with the dual path to
  without. Medians over rounds of the ratio of a round's means.
* `tpot_ratio`: the same of the time between two tokens, of all tokens but each answer's first, of paced agents;
  `tpot_ratio_hurried`: of hurried ones.
* `latest_s`: how long after its time a paced agent's turn began at most. Where it is long, the rate was not the same.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark.client import NativeClient, open_session
from benchmark.metrics import spread
from benchmark.modes.models import FIRST_PLAIN_TOKEN, VOCABULARY
from benchmark.pd_dual import KINDS, LIMIT_MB_PER_S, read_bytes, started
from benchmark.provenance import provenance

NAME = "agents"
COUNTED = (
    "remote_prefetches",
    "remote_prefetches_sent",
    "remote_prefetches_failed",
    "pulls",
    "pull_failed_pages",
    "fetches_failed",
)
LOADS = ("hurried", "paced")
NUM_ROUNDS = 2
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    num_agents: int = 32
    num_turns: int = 6
    first_tokens: int = 400
    added_tokens: int = 120
    answer_tokens: int = 16
    turns_per_s: float = 2.0
    """Of all paced agents. Without the dual path the prefill server reads for some 0.4 s for each."""

    def due_s(self, agent: int, turn: int) -> float:
        """When a paced agent's turn begins, after the start of all."""
        return (turn * self.num_agents + agent) / self.turns_per_s


FIRST = Sizes(num_agents=4, num_turns=3)
"""Rates are measured in it, and the first forwards of a size allocate: no lesson."""


@dataclass
class Played:
    """What one agent has seen."""

    duration_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    found_tokens: int = 0
    """Of its prompts, by the prefill server, wherever they were."""
    latest_s: float = 0.0
    """How long after its time a turn began."""


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    """Tokens of the tiny model."""
    return [rng.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(num_tokens)]


async def play(client: NativeClient, rng: random.Random, sizes: Sizes, due_s: Sequence[float]) -> Played:
    """All turns of one agent. ``due_s``: before when, after its start, none of them begins.

    Raises:
        RuntimeError: for a turn that failed.
    """
    played, prompt, start_s = Played(), drawn(rng, sizes.first_tokens), time.perf_counter()
    for turn_s in due_s:
        await asyncio.sleep(max(0.0, start_s + turn_s - time.perf_counter()))
        played.latest_s = max(played.latest_s, time.perf_counter() - start_s - turn_s)
        answer = await client.answer((), prompt, sizes.answer_tokens)
        if answer.error or len(answer.output_ids) != sizes.answer_tokens:
            raise RuntimeError(f"an agent's turn failed: {answer.error or answer.output_ids}")
        played.itl_s += answer.itl_s
        played.found_tokens += answer.cached_tokens
        prompt = [*prompt, *answer.output_ids, *drawn(rng, sizes.added_tokens)]
    played.duration_s = time.perf_counter() - start_s
    return played


async def _play_all(url: str, seed: str, sizes: Sizes, load: str) -> list[Played]:
    due_s = [
        [sizes.due_s(agent, turn) if load == "paced" else 0.0 for turn in range(sizes.num_turns)]
        for agent in range(sizes.num_agents)
    ]
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        agents = (play(client, random.Random(f"{seed}-{number}"), sizes, times) for number, times in enumerate(due_s))
        return await asyncio.gather(*agents)


def row_of(load: str, number: int, kind: str, agents: Sequence[Played], read: Mapping[str, int]) -> dict[str, Any]:
    """One row for each load, round and kind; ``read``: bytes that each side has read in it."""
    return {
        "load": load,
        "round": number,
        "kind": kind,
        **({"latest_s": round(max(agent.latest_s for agent in agents), 3)} if load == "paced" else {}),
        "jct_s": round(statistics.mean(agent.duration_s for agent in agents), 3),
        "last_s": round(max(agent.duration_s for agent in agents), 3),
        "tpot_s": round(statistics.mean(gap for agent in agents for gap in agent.itl_s), 5),
        "found_tokens": sum(agent.found_tokens for agent in agents),
        "read_bytes": dict(read),
    }


def measure(model: Path, out: Path, seed: int, sizes: Sizes | None = None) -> dict[str, Any]:
    sizes = sizes or Sizes()
    rows = []
    with started(NAME, model, out) as setting:
        for kind in KINDS:
            asyncio.run(_play_all(setting.urls[kind], f"{seed}-first-{kind}", FIRST, "hurried"))
        for load, number in itertools.product(LOADS, range(NUM_ROUNDS)):
            for kind in sorted(KINDS, reverse=number % 2 == 1):
                before = read_bytes(setting)
                agents = asyncio.run(_play_all(setting.urls[kind], f"{seed}-{load}-{number}-{kind}", sizes, load))
                read = {side: after - before[side] for side, after in read_bytes(setting).items()}
                rows.append(row_of(load, number, kind, agents, read))
        counters = {
            side: {word: setting.pair.total(server, word) for word in COUNTED}
            for side, server in (("prefill", setting.prefill), ("decode", setting.pair.decode))
        }
    return {
        "provenance": provenance(),
        "sizes": {**asdict(sizes), "num_rounds": NUM_ROUNDS, "limit_mb_per_s": float(LIMIT_MB_PER_S)},
        "rows": rows,
        "counters": counters,
    }


def ratios(rows: Sequence[Mapping[str, Any]], name: str, load: str) -> list[float]:
    """By round of a load: with the dual path to without."""
    found = {(row["round"], row["kind"]): row[name] for row in rows if row["load"] == load}
    return [found[number, "on"] / found[number, "off"] for number in sorted({number for number, _ in found})]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "agents_jct_ratio": spread(ratios(found["rows"], "jct_s", "hurried")),
        "tpot_ratio": spread(ratios(found["rows"], "tpot_s", "paced")),
        "tpot_ratio_hurried": spread(ratios(found["rows"], "tpot_s", "hurried")),
        "agents": found,
    }
