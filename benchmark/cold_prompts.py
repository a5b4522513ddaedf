# SPDX-License-Identifier: Apache-2.0
"""Do prompts of which nothing is cached wait for those of which nearly all is?

    python -m benchmark.cold_prompts                 # each arm three times, some twenty minutes each
    python -m benchmark.cold_prompts --quick         # a first impression, and whether it runs

A server of two ranks, or a router in front of two servers, gets prompts at random times: 19 of 20 begin as one that was
asked before, the others as none. The arms get the same prompts at the same times, one after the other in an order that
rotates with the repetition, each from a server that has just started. What counts is the time to the first token: of
cold prompts beside that of round robin at stock SGLang, of warm ones beside the same server's with an order that passes
nobody over, and how much of all such time the cold ones hold. Writes build/cold-prompts/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.load import send_at
from benchmark.metrics import distribution, paired_ratio
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.records import Answer
from benchmark.results import write_report
from benchmark.router_failover import router
from benchmark.servers import Server, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready

LEAST_TOKEN, MOST_TOKEN = 1_000, 30_000
TIMEOUT_S = 600.0
OUTPUT_TOKENS = 8
LPM = ("--schedule-policy", "lpm")


@dataclass(frozen=True)
class Arm:
    """Who serves: a server of two ranks, or two of one behind the router."""

    share: Share
    flags: tuple[str, ...] = ()
    is_routed: bool = False


ARMS = {
    "round robin": Arm("engine", ("--load-balance-method", "round_robin")),
    "lpm": Arm("engine", ("--load-balance-method", "round_robin", *LPM)),
    "banyan": Arm("on"),
    "banyan, lpm": Arm("on", LPM),
    "router": Arm("on", is_routed=True),
    "router, lpm": Arm("on", LPM, is_routed=True),
}
BASE = "round robin"


@dataclass(frozen=True)
class Work:
    """Prompts, when each is sent, and which are cold. ``heads``: what warm ones begin with."""

    heads: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    at_s: tuple[float, ...]
    is_cold: tuple[bool, ...]


def work(*, num_requests: int, num_heads: int, tokens: int, share_cold: float, per_s: float, seed: int) -> Work:
    """The same for the same arguments. Every prompt ends with a sixteenth of its own."""
    draw = random.Random(seed)
    own = tokens // 16
    heads = tuple(_tokens(draw, tokens - own) for _ in range(num_heads))
    # As many as asked for, at places drawn.
    cold = set(draw.sample(range(num_requests), round(share_cold * num_requests)))
    prompts, at_s, now_s = [], [], 0.0
    for number in range(num_requests):
        head = _tokens(draw, tokens - own) if number in cold else draw.choice(heads)
        prompts.append(head + _tokens(draw, own))
        now_s += draw.expovariate(per_s)
        at_s.append(now_s)
    return Work(heads, tuple(prompts), tuple(at_s), tuple(number in cold for number in range(num_requests)))


def _tokens(draw: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(draw.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(num_tokens))


async def play(url: str, some: Work) -> list[Answer]:
    """Send each prompt at its time, whoever has not been answered."""
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        for head in some.heads:
            await client.answer((), head, 1)
        return await send_at(client, some.prompts, some.at_s, OUTPUT_TOKENS)


def figures(some: Work, answers: Sequence[Answer]) -> dict[str, Any]:
    """Of one run of one arm."""
    times = {
        kind: [answer.ttft_s for cold, answer in pairs if cold is is_cold and answer.ttft_s is not None]
        for kind, is_cold in (("cold", True), ("warm", False))
        for pairs in (list(zip(some.is_cold, answers, strict=True)),)
    }
    total_s = sum(map(sum, times.values()))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return {
        **{f"{kind}_ttft_s": distribution(each) for kind, each in times.items()},
        "cold_share_of_ttft": round(sum(times["cold"]) / total_s, 4) if total_s else None,
        "cached_share": round(sum(a.cached_tokens for a in answers) / prompt_tokens, 4) if prompt_tokens else None,
        "num_errors": sum(bool(answer.error) for answer in answers),
    }


def verdicts(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By arm, within each repetition: cold p99 over that of round robin, and warm p50 over that of the same arm without
    ``lpm``, and over that of round robin."""

    def times(arm: str, kind: str, quantile: str) -> list[float]:
        return [run[f"{kind}_ttft_s"][quantile] for run in runs if run["arm"] == arm]

    arms = tuple(dict.fromkeys(run["arm"] for run in runs))

    def ratio(arm: str, base: str, kind: str, quantile: str) -> dict[str, Any] | None:
        return paired_ratio(times(arm, kind, quantile), times(base, kind, quantile)) if base in arms else None

    said = {}
    for arm in arms:
        plain = BASE if arm == "lpm" else arm.removesuffix(", lpm")
        said[arm] = {
            "cold_p99_to_round_robin": ratio(arm, BASE, "cold", "p99"),
            "warm_p50_to_plain": ratio(arm, plain, "warm", "p50"),
            "warm_p50_to_round_robin": ratio(arm, BASE, "warm", "p50"),
        }
    return said


@contextmanager
def serving(arm: Arm, label: str, model: Path, folder: Path, pool_tokens: int) -> Iterator[str]:
    """An arm that is up; where it is asked."""
    pool = ("--max-total-tokens", str(pool_tokens), "--sleep-on-idle", "--max-running-requests", "16")
    flags = (*CPU_ENGINE, *pool, *arm.flags)
    dp, cores = (1, (0, 1)) if arm.is_routed else (2, (0,))
    with ExitStack() as stack:
        specs = [ServerSpec(f"{label}-{core}", dp, arm.share, flags, cpu_env(dp=dp, first_core=core)) for core in cores]
        servers = [stack.enter_context(Server(spec, model, folder)) for spec in specs]
        wait_ready(servers)
        if not arm.is_routed:
            yield servers[0].url
            return
        urls = [server.url for server in servers]
        yield stack.enter_context(router(urls, "lmetric", folder / f"{label}-router.log"))


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.quick:
        args.requests, args.repetitions, args.tokens, args.heads = 60, 1, 256, 4
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    some = work(
        num_requests=args.requests,
        num_heads=args.heads,
        tokens=args.tokens,
        share_cold=args.cold,
        per_s=args.per_s,
        seed=args.seed,
    )
    # Room for every head at each rank, and as much for what comes and goes.
    pool_tokens = 2 * args.heads * args.tokens + 16 * args.tokens
    runs = []
    for repetition in range(1, args.repetitions + 1):
        for name in order_of_repetition(args.arm or list(ARMS), repetition):
            label = f"{name.replace(', ', '-').replace(' ', '-')}-{repetition}"
            with serving(ARMS[name], label, model, args.out / "logs", pool_tokens) as url:
                answers = asyncio.run(play(url, some))
            run = {"arm": name, "repetition": repetition, **figures(some, answers)}
            print(run, file=sys.stderr, flush=True)
            runs.append(run)
    said = verdicts(runs)
    for arm, ratios in said.items():
        print(arm, ratios)
    write_report(args.out / "report.json", {"runs": runs, "verdicts": said}, args)
    return 1 if any(run["num_errors"] for run in runs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.cold_prompts", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 short prompts, once")
    parser.add_argument("--arm", nargs="+", choices=list(ARMS), help="only these")
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1_024, help="of each prompt")
    parser.add_argument("--heads", type=int, default=16, help="that warm prompts begin with")
    parser.add_argument("--cold", type=float, default=0.05, help="share of prompts that begin as no other")
    parser.add_argument("--per-s", type=float, default=1.0, help="prompts a second; a queue is wanted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/cold-prompts"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
