# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin alike and come at once, as agents that start together send them: is that computed once?

    python -m benchmark.bursts                       # one rank and two, some 15 minutes
    python -m benchmark.bursts --quick               # a first impression, and whether it runs

Three servers, alike but for what their row says, are asked the same in turns, the others asleep: sharing off, the same
with SGLang's order that looks for prompts in its queue which begin alike (``--schedule-policy lpm``), and sharing on.
Each burst begins as none before. Then bursts to one of two ranks, of which the other one holds what all begin with:
what do they cost the prompts that the first one held? Writes build/bursts/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
PAGE_TOKENS = 16
NUM_CORES = 2
ARMS: dict[str, tuple[Share, tuple[str, ...]]] = {
    "off": ("off", ()),
    "off, lpm": ("off", ("--schedule-policy", "lpm")),
    "on": ("on", ()),
}
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE_TOKENS), "--sleep-on-idle"),
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

    def best_cached_share(self, *, num_computed: int) -> float:
        """Where each rank computes the head so many times."""
        best = self.head_tokens // PAGE_TOKENS * PAGE_TOKENS * (self.num_prompts - num_computed)
        return round(best / (self.num_prompts * (self.head_tokens + self.own_tokens)), 4)

    def __str__(self) -> str:
        return f"{self.num_prompts} x {self.head_tokens} + {self.own_tokens}"


BURSTS = (Burst(4, 1_000, 50), Burst(16, 500, 30), Burst(8, 2_000, 100))

# What a rank holds is in its pool only.
SMALL_POOLS = ("--max-total-tokens", "16000", "--banyan-host-gb", "0")
MOVED_BURSTS = (Burst(4, 3_000, 64), Burst(8, 2_400, 64), Burst(8, 3_600, 64))
NUM_OTHERS, OTHER_TOKENS = 4, 2_000
PUBLISHED_S = 0.3
"""After its answer a prompt can be found by the other rank."""


@dataclass(frozen=True, slots=True)
class Played:
    """One burst at one server: how long until its last answer had ended, the answers, and what came of the prompts that
    the rank had held, asked again; () where none were."""

    took_s: float
    answers: Sequence[Answer]
    others: Sequence[Answer] = ()


async def play(client: NativeClient, prompts: Sequence[Sequence[int]]) -> Played:
    """All at once."""
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(client.answer((), prompt, OUTPUT_TOKENS) for prompt in prompts))
    return Played(time.perf_counter() - began_s, answers)


async def play_anywhere(url: str, burst: Burst, num_ranks: int, seed: str) -> Played:
    """To all ranks."""
    async with open_session(TIMEOUT_S) as session:
        return await play(NativeClient(session, url), burst.prompts(num_ranks, seed))


async def play_at_first(url: str, burst: Burst, num_ranks: int, seed: str) -> Played:
    """To rank 0, which holds some others, while the next rank holds what all begin with."""
    prompts, draw = burst.prompts(1, seed), random.Random(f"others {seed}")
    others = [random_prompt(draw, OTHER_TOKENS) for _ in range(NUM_OTHERS)]
    async with open_session(TIMEOUT_S) as session:
        first, second = (NativeClient(session, url, {"routed_dp_rank": rank}) for rank in range(num_ranks))
        for prompt in others:
            await first.answer((), prompt, 1)
        await second.answer((), prompts[0][: burst.head_tokens], 1)
        await asyncio.sleep(PUBLISHED_S)
        played = await play(first, prompts)
        return replace(played, others=[await first.answer((), prompt, 1) for prompt in others])


def cached_share(answers: Sequence[Answer]) -> float:
    """Of the tokens of their prompts."""
    num_tokens = sum(answer.prompt_tokens for answer in answers)
    return round(sum(answer.cached_tokens for answer in answers) / num_tokens, 4) if num_tokens else 0.0


def figures(played: Played, off: Played) -> dict[str, Any]:
    """Of one burst at one server; ``off``: at sharing off."""
    answers = played.answers
    return {
        "answered_s": round(played.took_s, 4),
        "mean_ttft_s": round(mean(answer.ttft_s for answer in answers if answer.ttft_s is not None), 4),
        "cached_share": cached_share(answers),
        "others_cached_share": cached_share(played.others) if played.others else None,
        "num_same_answers": sum(a.output_ids == b.output_ids for a, b in zip(answers, off.answers, strict=True)),
        "num_errors": sum(bool(answer.error) for answer in (*answers, *played.others)),
    }


def row(ranks: int, burst: Burst, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of all rounds of one burst."""
    times = {arm: {key: [run[key] for run in some] for key in some[0]} for arm, some in runs.items()}
    moves = times["off"]["others_cached_share"][0] is not None
    return {
        "ranks": ranks,
        "burst": str(burst),
        "best_cached_share": burst.best_cached_share(num_computed=0 if moves else 1),
        "arms": {
            arm: {
                "answered_s": median(figure["answered_s"]),
                "mean_ttft_s": median(figure["mean_ttft_s"]),
                "cached_share": median(figure["cached_share"]),
                "others_cached_share": median(figure["others_cached_share"]) if moves else None,
                "answered_to_off": paired_ratio(figure["answered_s"], times["off"]["answered_s"]),
                "ttft_to_off": paired_ratio(figure["mean_ttft_s"], times["off"]["mean_ttft_s"]),
            }
            for arm, figure in times.items()
        },
        "runs": runs,
    }


@dataclass(frozen=True, slots=True)
class Scene:
    """Servers with so many ranks, and the bursts that they are asked."""

    name: str
    num_ranks: int
    bursts: Sequence[Burst]
    play: Callable[[str, Burst, int, str], Coroutine[Any, Any, Played]] = play_anywhere
    arms: Sequence[str] = tuple(ARMS)
    flags: tuple[str, ...] = ()


def measured(scene: Scene, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one scene."""
    ranks, env = scene.num_ranks, (*cpu_env(dp=scene.num_ranks, num_cores=NUM_CORES), *ENV)
    rows = []
    with ExitStack() as stack:
        servers = {}
        for arm in scene.arms:
            share, flags = ARMS[arm]
            label = f"{arm.replace(', ', '-')}-{scene.name}"
            spec = ServerSpec(label, ranks, share, (*FLAGS, *flags, *scene.flags), env)
            servers[arm] = stack.enter_context(Server(spec, models.ensure(models.WIDE), args.out / "logs"))
        wait_ready(list(servers.values()))
        for server in servers.values():
            server.asleep()
        for burst in scene.bursts:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in scene.arms}
            # The first round is to warm up.
            for number in range(args.rounds + 1):
                played = {}
                for arm in order_of_repetition(list(scene.arms), number):
                    with turn_of(servers[arm]):
                        seed = f"{args.seed} {burst} {number}"
                        played[arm] = asyncio.run(scene.play(servers[arm].url, burst, ranks, seed))
                for arm, of_arm in played.items() if number else ():
                    runs[arm].append(figures(of_arm, played["off"]))
            rows.append(row(ranks, burst, runs))
            print(scene.name, burst, rows[-1]["best_cached_share"], rows[-1]["arms"], file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    scenes = [Scene(str(ranks), ranks, BURSTS) for ranks in args.ranks]
    moving = [Scene("moved", 2, MOVED_BURSTS, play_at_first, ("off", "on"), SMALL_POOLS)]
    if args.quick:
        args.rounds, scenes, moving = 1, [Scene("1", 1, BURSTS[:1])], []
    unwind_on_sigterm()
    rows = [row for scene in scenes for row in measured(scene, args)]
    moved = [row for scene in moving for row in measured(scene, args)]
    write_report(args.out / "report.json", {"rows": rows, "moved": moved}, args)
    runs = [run for row in (*rows, *moved) for some in row["runs"].values() for run in some]
    return 1 if any(run["num_errors"] for run in runs) else 0


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
