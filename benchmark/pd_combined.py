# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server against two servers that do both, on the same two cores, by prompt length and load.

    python -m benchmark.pd_combined [--quick]

Each server is one rank of one compute thread, with Banyan; `banyan route` stands in front of the pair, and of the two
combined servers. All four are up together, with equal pools, and only one arrangement is asked at a time. Prompts are
random tokens that nobody has seen, so nothing is found: what is compared is where forwards run. So many requests are
under way at any time (closed loop), each with an answer of fixed length. The arrangements take turns, and the first
changes from round to round. Ratios are of the pair to the combined servers within one round.

* `tokens_per_s_ratio`: output tokens a second, all answers over the time from the first request to the last token.
* `ttft_ratio`, `itl_ratio`, `itl_p99_ratio`: means of the time to the first token and between two tokens, and the 99th
  percentile of the latter.

Writes build/pd-combined/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.client import NativeClient, open_session
from benchmark.load import send_all
from benchmark.metrics import paired_ratio
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.pd_servers import PAIR_ENV, SERVER_ARGS, START_TIMEOUT_S, Pair
from benchmark.records import Answer
from benchmark.results import write_report
from benchmark.router_failover import router
from benchmark.router_failover import server_spec as routed_spec
from benchmark.servers import ServerSpec, unwind_on_sigterm, wait_ready
from benchmark.warm import ForkedServer
from benchmark.workload.generated import random_ids

TIMEOUT_S = 600.0
POLICY = "lmetric"
FIGURES = ("tokens_per_s", "ttft_s", "itl_s", "itl_p99_s")
RATIOS = dict(zip(("tokens_per_s_ratio", "ttft_ratio", "itl_ratio", "itl_p99_ratio"), FIGURES, strict=True))


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: tuple[int, ...] = (128, 512, 1024, 2048)
    in_flight: tuple[int, ...] = (2, 10)
    answer_tokens: int = 50
    requests_in_flight: int = 2
    """A run asks so many times as many requests as are in flight, and at least ``least_requests``."""
    least_requests: int = 8
    num_rounds: int = 3
    pool_tokens: int = 32_000
    """Of each server."""

    def num_requests(self, in_flight: int) -> int:
        return max(self.least_requests, self.requests_in_flight * in_flight)


QUICK = Sizes((128, 512), (2,), answer_tokens=12, least_requests=4, requests_in_flight=1, num_rounds=1)


async def ask_all(url: str, prompts: Sequence[Sequence[int]], in_flight: int, answer_tokens: int) -> list[Answer]:
    """The answers in the order of ``prompts``; as soon as one is whole, the next prompt is sent."""
    async with open_session(TIMEOUT_S) as session:
        return await send_all(NativeClient(session, url), prompts, in_flight, answer_tokens)


def figures(answers: Sequence[Answer], took_s: float) -> dict[str, float]:
    """Of one run.

    Raises:
        RuntimeError: for an answer that failed; a time without it would flatter.
    """
    for answer in answers:
        if answer.error or answer.ttft_s is None:
            raise RuntimeError(f"a request failed: {answer.error or 'no first token'}")
    gaps_s = [gap_s for answer in answers for gap_s in answer.itl_s]
    return {
        "tokens_per_s": round(sum(answer.completion_tokens for answer in answers) / took_s, 3),
        "ttft_s": round(statistics.mean(answer.ttft_s or 0.0 for answer in answers), 4),
        "itl_s": round(statistics.mean(gaps_s), 5),
        "itl_p99_s": round(float(np.percentile(gaps_s, 99)), 5),
    }


def run(url: str, rng: random.Random, prompt_tokens: int, in_flight: int, sizes: Sizes) -> dict[str, float]:
    """One arrangement, one length, one load."""
    prompts = [random_ids(rng, prompt_tokens) for _ in range(sizes.num_requests(in_flight))]
    start_s = time.monotonic()
    answers = asyncio.run(ask_all(url, prompts, in_flight, sizes.answer_tokens))
    return figures(answers, time.monotonic() - start_s)


def measure(urls: Mapping[str, str], sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    """A row for each length, load, round and arrangement (``pair``, ``combined``)."""
    rng = random.Random(f"combined-{seed}")
    for kind, length in product(urls, sizes.prompt_tokens):
        # The first forwards of a size allocate: no lesson.
        run(urls[kind], rng, length, 2, QUICK)
    rows = []
    for number, length, in_flight in product(range(sizes.num_rounds), sizes.prompt_tokens, sizes.in_flight):
        for kind in sorted(urls, reverse=number % 2 == 1):
            found = run(urls[kind], rng, length, in_flight, sizes)
            rows.append({"prompt_tokens": length, "in_flight": in_flight, "round": number, "kind": kind, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each length and load: medians of both arrangements, and the spread of the ratios over rounds."""
    found = []
    for length, in_flight in dict.fromkeys((row["prompt_tokens"], row["in_flight"]) for row in rows):
        of_cell = [row for row in rows if (row["prompt_tokens"], row["in_flight"]) == (length, in_flight)]
        by_kind = {
            kind: {name: [row[name] for row in of_cell if row["kind"] == kind] for name in FIGURES}
            for kind in ("pair", "combined")
        }
        medians = {kind: {name: statistics.median(some[name]) for name in FIGURES} for kind, some in by_kind.items()}
        ratios = {
            ratio: paired_ratio(by_kind["pair"][name], by_kind["combined"][name]) for ratio, name in RATIOS.items()
        }
        found.append({"prompt_tokens": length, "in_flight": in_flight, **ratios, "medians": medians})
    return found


def combined(core: int, pools: Sequence[str]) -> ServerSpec:
    """One of the two servers that do both, which is checked as those of the pair are."""
    spec = routed_spec(f"combined-{core}", core, (*SERVER_ARGS, *pools))
    return replace(spec, share="on", env=(*spec.env, *PAIR_ENV))


@contextmanager
def arrangements(model: Path, logs: Path, sizes: Sizes) -> Iterator[dict[str, str]]:
    """The URLs of the routers in front of both."""
    pools = ("--max-total-tokens", str(sizes.pool_tokens))
    # Else a decode server reserves host memory for what it retracts.
    decode = (*pools, "--disaggregation-decode-retraction-backup", "cpu_tensor")
    with ExitStack() as stack:
        both = [stack.enter_context(ForkedServer(combined(core, pools), model, logs)) for core in range(2)]
        pair = Pair("pair", "on", model, logs, prefill_args=pools, decode_args=decode, kind=ForkedServer)
        stack.enter_context(pair)
        wait_ready(both, timeout_s=START_TIMEOUT_S)
        front = stack.enter_context(router([server.url for server in both], POLICY, logs / "combined-router.log"))
        yield {"pair": stack.enter_context(pair.routed()), "combined": front}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.pd_combined", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two lengths, one load, one round: whether it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/pd-combined"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    sizes = QUICK if args.quick else Sizes()
    with arrangements(ensure_model(DEFAULT_TARGET), args.out / "logs", sizes) as urls:
        rows = measure(urls, sizes, args.seed)
    found = {"cells": cells(rows), "sizes": asdict(sizes), "rows": rows}
    print(json.dumps(found["cells"], indent=2))
    # What docs/benchmarks/pd_combined.json is a copy of.
    write_report(args.out / "report.json", found, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
