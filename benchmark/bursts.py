# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin alike and come at once, as agents that start together send them: is that computed once?

    python -m benchmark.bursts                       # one rank and two, some ten minutes
    python -m benchmark.bursts --quick               # a first impression, and whether it runs

Three servers, alike but for what their row says, are asked the same in turns, the others asleep: sharing off, the same
with SGLang's order that looks for prompts in its queue which begin alike (``--schedule-policy lpm``), and sharing on.
Each burst begins as none before. Writes build/bursts/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.metrics import paired_ratio
from benchmark.modes import models
from benchmark.modes.models import random_prompt
from benchmark.modes.run import ENV
from benchmark.processes import turn_of
from benchmark.records import Answer
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready

TIMEOUT_S = 600.0
OUTPUT_TOKENS = 8
ARMS: dict[str, tuple[Share, tuple[str, ...]]] = {
    "off": ("off", ()),
    "off, lpm": ("off", ("--schedule-policy", "lpm")),
    "on": ("on", ()),
}
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--page-size", "16", "--sleep-on-idle"),
    *("--context-length", "4096", "--max-total-tokens", "60000", "--chunked-prefill-size", "4096"),
)


@dataclass(frozen=True, slots=True)
class Burst:
    """``num_prompts`` for each rank: all begin with the same ``head_tokens`` and end with ``own_tokens`` of theirs."""

    num_prompts: int
    head_tokens: int
    own_tokens: int

    def prompts(self, num_ranks: int, seed: str) -> list[list[int]]:
        draw = random.Random(seed)
        head = random_prompt(draw, self.head_tokens)
        return [head + random_prompt(draw, self.own_tokens) for _ in range(num_ranks * self.num_prompts)]

    def __str__(self) -> str:
        return f"{self.num_prompts} x {self.head_tokens} + {self.own_tokens}"


BURSTS = (Burst(4, 1_000, 50), Burst(16, 500, 30), Burst(8, 2_000, 100))


async def play(url: str, prompts: Sequence[Sequence[int]]) -> tuple[float, list[Answer]]:
    """All at once; until the last answer has ended."""
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        began_s = time.perf_counter()
        answers = await asyncio.gather(*(client.answer((), prompt, OUTPUT_TOKENS) for prompt in prompts))
        return time.perf_counter() - began_s, list(answers)


def figures(took_s: float, answers: Sequence[Answer], first: Sequence[Answer]) -> dict[str, Any]:
    """Of one burst at one server. ``first``: the answers of sharing off."""
    return {
        "answered_s": round(took_s, 4),
        "mean_ttft_s": round(mean(answer.ttft_s for answer in answers if answer.ttft_s is not None), 4),
        "cached_share": round(sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers), 4),
        "num_same_answers": sum(a.output_ids == b.output_ids for a, b in zip(answers, first, strict=True)),
        "num_errors": sum(bool(answer.error) for answer in answers),
    }


def row(ranks: int, burst: Burst, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of all rounds of one burst."""
    times = {arm: {key: [run[key] for run in some] for key in some[0]} for arm, some in runs.items()}
    # Of the best there can be each rank computes the head once.
    best = burst.head_tokens // 16 * 16 * (burst.num_prompts - 1)
    best_share = best / (burst.num_prompts * (burst.head_tokens + burst.own_tokens))
    return {
        "ranks": ranks,
        "burst": str(burst),
        "best_cached_share": round(best_share, 4),
        "arms": {
            arm: {
                "answered_s": median(figure["answered_s"]),
                "mean_ttft_s": median(figure["mean_ttft_s"]),
                "cached_share": median(figure["cached_share"]),
                "answered_to_off": paired_ratio(figure["answered_s"], times["off"]["answered_s"]),
                "ttft_to_off": paired_ratio(figure["mean_ttft_s"], times["off"]["mean_ttft_s"]),
            }
            for arm, figure in times.items()
        },
        "runs": runs,
    }


def measured(ranks: int, bursts: Sequence[Burst], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of servers with so many ranks."""
    env = (*cpu_env(dp=ranks, num_cores=2), *ENV)
    rows = []
    with ExitStack() as stack:
        servers = {}
        for arm, (share, flags) in ARMS.items():
            spec = ServerSpec(f"{arm.replace(', ', '-')}-{ranks}", ranks, share, (*FLAGS, *flags), env)
            servers[arm] = stack.enter_context(Server(spec, models.ensure(models.WIDE), args.out / "logs"))
        wait_ready(list(servers.values()))
        for server in servers.values():
            server.asleep()
        for burst in bursts:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            # The first round is to warm up.
            for number in range(args.rounds + 1):
                prompts = burst.prompts(ranks, f"{args.seed} {burst} {number}")
                played = {}
                for arm in order_of_repetition(list(ARMS), number):
                    with turn_of(servers[arm]):
                        played[arm] = asyncio.run(play(servers[arm].url, prompts))
                for arm, (took_s, answers) in played.items() if number else ():
                    runs[arm].append(figures(took_s, answers, played["off"][1]))
            rows.append(row(ranks, burst, runs))
            print(ranks, burst, rows[-1]["best_cached_share"], rows[-1]["arms"], file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.quick:
        args.rounds, args.ranks = 1, [1]
    unwind_on_sigterm()
    rows = [row for ranks in args.ranks for row in measured(ranks, BURSTS[:1] if args.quick else BURSTS, args)]
    write_report(args.out / "report.json", {"rows": rows}, args)
    return 1 if any(run["num_errors"] for row in rows for some in row["runs"].values() for run in some) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.bursts", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one burst at one rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bursts"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
