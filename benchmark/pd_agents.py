# SPDX-License-Identifier: Apache-2.0
"""What it is worth for agents that a decode server reads for its prefill server.

    python -m benchmark.pd --dual agents

The pair of `pd_dual` with the prefill server's reads limited. Agents go through some turns each, all at once: a prompt,
an answer, and at once the next turn, whose prompt is the one before with its answer and what the agent adds. Pools and
arenas hold a few of them, so that a turn's prefix is mostly in the store alone. Agents of one kind use the router with
the dual path, those of the other the router without; the kinds take turns, with prompts of their own each time.

* `agents_jct_ratio`: how long an agent takes from its first prompt to its last token, with the dual path to without.
  Medians over rounds of the ratio of a round's means.
* `tpot_ratio`: the same of the time between two tokens, of all tokens but each answer's first.
"""

from __future__ import annotations

import asyncio
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
COUNTED = ("errands", "errands_sent", "errands_failed", "pulls", "pull_failed_pages", "fetches_failed")
NUM_ROUNDS = 2
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    num_agents: int = 32
    num_turns: int = 6
    first_tokens: int = 400
    added_tokens: int = 120
    answer_tokens: int = 16


@dataclass
class Played:
    """What one agent has seen."""

    duration_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    found_tokens: int = 0
    """Of its prompts, by the prefill server, wherever they were."""


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    """Tokens of the tiny model."""
    return [rng.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(num_tokens)]


async def play(client: NativeClient, rng: random.Random, sizes: Sizes) -> Played:
    """All turns of one agent.

    Raises:
        RuntimeError: for a turn that failed.
    """
    played, prompt, start_s = Played(), drawn(rng, sizes.first_tokens), time.perf_counter()
    for _ in range(sizes.num_turns):
        answer = await client.answer((), prompt, sizes.answer_tokens)
        if answer.error or len(answer.output_ids) != sizes.answer_tokens:
            raise RuntimeError(f"an agent's turn failed: {answer.error or answer.output_ids}")
        played.itl_s += answer.itl_s
        played.found_tokens += answer.cached_tokens
        prompt = [*prompt, *answer.output_ids, *drawn(rng, sizes.added_tokens)]
    played.duration_s = time.perf_counter() - start_s
    return played


async def _play_all(url: str, seed: str, sizes: Sizes) -> list[Played]:
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        agents = (play(client, random.Random(f"{seed}-{number}"), sizes) for number in range(sizes.num_agents))
        return await asyncio.gather(*agents)


def row_of(number: int, kind: str, agents: Sequence[Played], read: Mapping[str, int]) -> dict[str, Any]:
    """One row for each round and kind; ``read``: bytes that each side has read in it."""
    return {
        "round": number,
        "kind": kind,
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
            # Rates are measured, and the first forwards of a size allocate: no lesson.
            asyncio.run(_play_all(setting.urls[kind], f"{seed}-first-{kind}", Sizes(num_agents=4, num_turns=3)))
        for number in range(NUM_ROUNDS):
            for kind in sorted(KINDS, reverse=number % 2 == 1):
                before = read_bytes(setting)
                agents = asyncio.run(_play_all(setting.urls[kind], f"{seed}-{number}-{kind}", sizes))
                read = {side: after - before[side] for side, after in read_bytes(setting).items()}
                rows.append(row_of(number, kind, agents, read))
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


def ratios(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """By round: with the dual path to without."""
    found = {(row["round"], row["kind"]): row[name] for row in rows}
    return [found[number, "on"] / found[number, "off"] for number in sorted({row["round"] for row in rows})]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "agents_jct_ratio": spread(ratios(found["rows"], "jct_s")),
        "tpot_ratio": spread(ratios(found["rows"], "tpot_s")),
        "agents": found,
    }
