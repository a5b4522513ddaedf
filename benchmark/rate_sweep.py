# SPDX-License-Identifier: Apache-2.0
"""Load until it breaks: how many requests a second does each system answer soon enough?

    python -m benchmark.rate_sweep --data FOLDER          # six systems three times, some five minutes each
    python -m benchmark.rate_sweep --quick                # a first impression, and whether it runs

Conversations are asked once, so that each system has of them what it keeps. Then they go on, in an order that is drawn,
at times that are drawn (Poisson), whoever has not been answered: so many a second for a while, then more. Each request
is a conversation's history with a short new turn. Every system gets the same requests at the same times, with the
means of `benchmark.alternatives`: two ranks of one thread each, equal pools, one CPU engine. Systems take turns, and
each repetition is drawn anew. A request counts where its time to the first token is within so many times that of a hit
on an idle server, the quickest of any system. Writes build/rates/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.alternatives.play import warm_up
from benchmark.alternatives.start import Running, hicache_path, running
from benchmark.alternatives.systems import (
    CONTEXT_TOKENS,
    GIB,
    NUM_RANKS,
    USUAL_DRAM_TOKENS,
    Budget,
    systems_of,
    token_bytes_of,
)
from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.load import send_all, send_at
from benchmark.metrics import cached_by_source, distribution, spread
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import dtype_for, features_here
from benchmark.records import Answer
from benchmark.results import write_report
from benchmark.servers import Server, unwind_on_sigterm
from benchmark.workload.generated import ChatShape, generate_conversations, random_ids
from benchmark.workload.scripts import ScriptLimits, history_scripts
from benchmark.workload.sharegpt import load_conversations, openings
from benchmark.workload.tokenizer import HuggingFaceTokenizer

SYSTEMS = ("stock", "router", "hicache", "lmcache", "banyan", "banyan_route")
RATES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WITHIN = (1, 2, 5)
"""Times the first token of a hit on an idle server."""

ENOUGH = 0.9
"""Of the requests: a system that answers fewer of them within the last of ``WITHIN`` has fallen over."""

HISTORY_TURNS = 20
TURN_TOKENS = 32
OUTPUT_TOKENS = 16
TIMEOUT_S = 120.0
NUM_PRIMING = 4
NUM_IDLE = 12


@dataclass(frozen=True)
class Load:
    """What is sent at one rate for so many seconds: prompts, and when, from its begin."""

    per_s: float
    seconds: float
    prompts: tuple[tuple[int, ...], ...]
    at_s: tuple[float, ...]


def loads(histories: Sequence[Sequence[int]], rates: Sequence[float], seconds: float, seed: int) -> list[Load]:
    """The same for the same arguments."""
    draw = random.Random(seed)
    made = []
    for per_s in rates:
        now_s, prompts, at_s = draw.expovariate(per_s), [], []
        while now_s < seconds:
            prompts.append(next_turn(draw, histories))
            at_s.append(now_s)
            now_s += draw.expovariate(per_s)
        made.append(Load(per_s, seconds, tuple(prompts), tuple(at_s)))
    return made


def next_turn(draw: random.Random, histories: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Some conversation goes on."""
    return (*draw.choice(histories), *random_ids(draw, TURN_TOKENS))


async def play(url: str, load: Load) -> list[Answer]:
    """Send each prompt at its time."""
    async with open_session(TIMEOUT_S) as session:
        return await send_at(NativeClient(session, url), load.prompts, load.at_s, OUTPUT_TOKENS)


async def prime(url: str, histories: Sequence[Sequence[int]]) -> None:
    """Ask every conversation once, a few at a time."""
    async with open_session(TIMEOUT_S) as session:
        answers = await send_all(NativeClient(session, url), histories, NUM_PRIMING, OUTPUT_TOKENS)
    for answer in answers:
        if answer.error:
            raise RuntimeError(answer.error)


async def idle_hit_s(url: str, histories: Sequence[Sequence[int]], seed: int) -> float:
    """The time to the first token of what was asked a moment ago, nothing else running; every rank has it then."""
    draw, found = random.Random(seed), []
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        history = sorted(histories, key=len)[len(histories) // 2]
        for number in range(NUM_RANKS + NUM_IDLE):
            answer = await client.answer((), (*history, *random_ids(draw, TURN_TOKENS)), OUTPUT_TOKENS)
            if number >= NUM_RANKS and answer.ttft_s is not None:
                found.append(answer.ttft_s)
    return statistics.median(found)


def figures(load: Load, answers: Sequence[Answer], took_s: float) -> dict[str, Any]:
    """Of one rate. ``ttfts_s``: of each request in order, None where it failed."""
    done = [answer for answer in answers if not answer.error]
    prompt_tokens = sum(answer.prompt_tokens for answer in done)
    ttfts_s = [None if answer.error or answer.ttft_s is None else round(answer.ttft_s, 4) for answer in answers]
    gaps_ms = [1e3 * gap_s for answer in done for gap_s in answer.itl_s]
    return {
        "per_s": load.per_s,
        "sent_per_s": round(len(answers) / load.seconds, 3),
        "num_requests": len(answers),
        "num_errors": len(answers) - len(done),
        "took_s": round(took_s, 1),
        "cached_share": round(sum(answer.cached_tokens for answer in done) / max(1, prompt_tokens), 4),
        "cached_by_source": cached_by_source(done),
        "ttft_s": distribution(ttft_s for ttft_s in ttfts_s if ttft_s is not None),
        "inter_token_latency_ms": distribution(gaps_ms),
        "ttfts_s": ttfts_s,
    }


def within(rate: Mapping[str, Any], hit_s: float) -> dict[str, float]:
    """The share of one rate's requests that were answered soon enough, by how many times ``hit_s``. A request that
    failed, or was never sent, was not."""
    ttfts_s = [ttft_s for ttft_s in rate["ttfts_s"] if ttft_s is not None]
    return {
        str(times): round(sum(ttft_s <= times * hit_s for ttft_s in ttfts_s) / max(1, rate["num_requests"]), 4)
        for times in WITHIN
    }


def verdicts(systems: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What each system carries, by its repetitions: the shares by rate; how many requests a second of those sent were
    answered within the longest time, at the best of its rates; the highest rate of which enough were, in the median."""
    hit_s = min(run["idle_hit_s"] for runs in systems.values() for run in runs)
    said: dict[str, Any] = {"idle_hit_s": hit_s, "systems": {}}
    longest = str(WITHIN[-1])
    for name, runs in systems.items():
        played = [(rate, within(rate, hit_s)) for run in runs for rate in run["rates"]]
        of_rate = {
            f"{per_s:g}": {
                times: spread([share[times] for rate, share in played if rate["per_s"] == per_s])
                for times in map(str, WITHIN)
            }
            for per_s in sorted({rate["per_s"] for rate, _ in played})
        }
        best = [max(rate["sent_per_s"] * within(rate, hit_s)[longest] for rate in run["rates"]) for run in runs]
        carried = [float(per_s) for per_s, share in of_rate.items() if share[longest]["median"] >= ENOUGH]
        said["systems"][name] = {
            "within": of_rate,
            "goodput_per_s": spread([round(per_s, 3) for per_s in best]),
            "carries_per_s": max(carried, default=0.0),
        }
    return said


def sweep(system: Running, histories: Sequence[Sequence[int]], some: Sequence[Load], seed: int) -> dict[str, Any]:
    """One system, rate by rate, until it has fallen over at two of them by its own idle hit."""
    warm_up(system)
    asyncio.run(prime(system.url, histories))
    hit_s = asyncio.run(idle_hit_s(system.url, histories, seed))
    rates: list[dict[str, Any]] = []
    num_fallen = 0
    for load in some:
        start_s = time.monotonic()
        rate = figures(load, asyncio.run(play(system.url, load)), time.monotonic() - start_s)
        rates.append(rate)
        share = within(rate, hit_s)
        said = {key: rate[key] for key in ("per_s", "num_requests", "num_errors", "took_s", "cached_share", "ttft_s")}
        print(system.system.name, f"idle hit {hit_s:.3f} s", said, share, file=sys.stderr, flush=True)
        num_fallen += share[str(WITHIN[-1])] < ENOUGH
        if num_fallen == 2:
            break
    return {"idle_hit_s": round(hit_s, 4), "start_up_s": round(system.start_up_s, 1), "rates": rates}


def histories_of(args: argparse.Namespace, model: Path) -> list[tuple[int, ...]]:
    """The conversations' tokens, without what they go on with."""
    tokenizer = HuggingFaceTokenizer(str(model))
    limits = ScriptLimits(args.conversations, HISTORY_TURNS, CONTEXT_TOKENS // 2, OUTPUT_TOKENS)
    if args.data is None:
        shape = ChatShape(num_turns=HISTORY_TURNS // 2 + 1, mean_answer_words=90)
        conversations = generate_conversations(args.conversations, seed=args.seed, shape=shape)
    else:
        conversations = openings(load_conversations(args.data))
    scripts = history_scripts(conversations, tokenizer, limits)
    return [tuple(tokenizer.chat_ids(script.steps[0].messages)) for script in scripts]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.quick:
        args.conversations, args.seconds, args.rates, args.repetitions = 8, 8.0, [1.0, 4.0], 1
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    histories = histories_of(args, model)
    num_tokens = sum(map(len, histories))
    dtype = dtype_for(features_here())
    token_bytes = token_bytes_of(json.loads((model / "config.json").read_text()), dtype)
    # One copy of all conversations, and room for what runs; not two.
    pool_tokens = max(NUM_RANKS * CONTEXT_TOKENS, round(args.pools * num_tokens))
    budget = Budget(pool_tokens, args.dram_tokens, 8 * GIB, token_bytes, dtype)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.system or SYSTEMS}
    for repetition in range(args.repetitions):
        some = loads(histories, args.rates, args.seconds, args.seed + repetition)
        for name in order_of_repetition(list(found), repetition):
            # What HiCache writes is not what is measured here; it ends with the run.
            with tempfile.TemporaryDirectory(prefix="banyan-rates-") as disk:
                systems = systems_of(budget, Path(disk), hicache_path(args.out / "plugin"))
                with running(systems[name], model, args.out / "logs", Server) as up:
                    found[name].append(sweep(up, histories, some, args.seed))
    said = verdicts(found)
    for name, verdict in said["systems"].items():
        print(name, verdict)
    sizes = {"num_conversations": len(histories), "history_tokens": num_tokens, "pool_tokens": pool_tokens}
    write_report(args.out / "report.json", {"sizes": sizes, "systems": found, "verdicts": said}, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.rate_sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="8 conversations, two rates, once")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--data", type=Path, help="ShareGPT-format file or its folder; without it they are generated")
    parser.add_argument("--system", nargs="+", choices=[*SYSTEMS, "as_shipped"], help="only these")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="requests a second, rising")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each rate")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--pools", type=float, default=1.2, help="of all ranks together, in copies of all histories")
    parser.add_argument(
        "--dram-tokens", type=int, default=USUAL_DRAM_TOKENS, help="beside the pools, where a system has DRAM"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/rates"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
