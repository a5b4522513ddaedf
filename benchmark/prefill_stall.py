# SPDX-License-Identifier: Apache-2.0
"""How long do running decodes stall while heavy prompts are prefilled, without a compute quota and with one?

    banyan profile --output profile.json          # against a server of the same model
    python -m benchmark.prefill_stall --profile profile.json --quota-ms 400 150

One server without a quota and one for each quota, measured in turn (the others are stopped meanwhile). In each turn one
request decodes; once it runs, heavy prompts of random tokens arrive one after the other. Reported: the longest gap
between two tokens of the decoding request, the time to first token of the heavy ones (what the quota costs), and
the longest prefill forward as the rank's own clock saw it. Writes build/prefill-stall/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from banyan.cli.engine import Engine
from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.measure import flush_cache
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.records import Answer
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.workload.generated import random_ids

SERVER_ARGS = (*CPU_ENGINE, "--max-total-tokens", "20000", "--context-length", "8192", "--sleep-on-idle")
DECODE_PROMPT_TOKENS = 64
TIMEOUT_S = 300.0


async def one_turn(url: str, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """A decode with heavy prefills beside it; times in seconds."""
    await flush_cache(url)
    first = _num_forwards(url)
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        decode = asyncio.create_task(client.answer((), random_ids(rng, DECODE_PROMPT_TOKENS), args.decode_tokens))
        await asyncio.sleep(args.head_start_s)
        heavy: list[Answer] = []
        start_s = time.perf_counter()
        for _ in range(args.num_heavy):
            heavy.append(await client.answer((), random_ids(rng, args.heavy_tokens), 1))
        heavy_s = time.perf_counter() - start_s
        still_decoding = not decode.done()
        answer = await decode
    errors = [one.error for one in (*heavy, answer) if one.error]
    if errors or not still_decoding:
        raise RuntimeError(f"the turn says nothing: {errors or 'the decode ended first, raise --decode-tokens'}")
    return {
        "longest_stall_s": max(answer.itl_s),
        "heavy_ttft_s": statistics.median(one.ttft_s for one in heavy if one.ttft_s is not None),
        "heavy_total_s": heavy_s,
        "longest_forward_s": _longest_forward_s(url, first),
    }


def summarise(turns: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and range of each figure, by label."""
    labels = dict.fromkeys(turn["label"] for turn in turns)
    figures = [name for name in turns[0] if name.endswith("_s")]
    return {
        label: {
            f"{name}:{kind}": pick([turn[name] for turn in turns if turn["label"] == label])
            for name in figures
            for kind, pick in (("median", statistics.median), ("min", min), ("max", max))
        }
        for label in labels
    }


def _num_forwards(url: str) -> int:
    return max((one["number"] + 1 for one in Engine(url).ranks()[0]["forwards"]), default=0)


def _longest_forward_s(url: str, first: int) -> float:
    forwards = [one for one in Engine(url).ranks()[0]["forwards"] if one["number"] >= first]
    return max(one["forward_us"] for one in forwards) / 1e6


def _specs(args: argparse.Namespace) -> list[ServerSpec]:
    profile = ("--banyan-profile", str(args.profile.resolve()))
    plain = ServerSpec("no quota", 1, "on", (*SERVER_ARGS, *profile), cpu_env(dp=1))
    quotas = [
        replace(plain, label=f"quota {ms:g} ms", args=(*plain.args, "--banyan-prefill-quota-ms", str(ms)))
        for ms in args.quota_ms
    ]
    return [plain, *quotas]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.prefill_stall", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True, help="written by `banyan profile`")
    parser.add_argument("--quota-ms", type=float, nargs="+", default=[400.0, 150.0])
    parser.add_argument("--heavy-tokens", type=int, default=3000)
    parser.add_argument("--num-heavy", type=int, default=2)
    parser.add_argument("--decode-tokens", type=int, default=400)
    parser.add_argument("--head-start-s", type=float, default=2.0, help="how long the decode runs before")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/prefill-stall"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    turns: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {spec.label: stack.enter_context(Server(spec, model, args.out / "logs")) for spec in _specs(args)}
        wait_ready(list(servers.values()))
        for repetition in range(1, args.repetitions + 1):
            for label in order_of_repetition(list(servers), repetition):
                for other, server in servers.items():
                    server.awake() if other == label else server.asleep()
                time.sleep(0.5)
                # The same prompts for every server.
                rng = random.Random(f"{args.seed} {repetition}")
                turn = asyncio.run(one_turn(servers[label].url, args, rng))
                turns.append({"label": label, "repetition": repetition, **turn})
                print(json.dumps(turns[-1]), flush=True)
        for server in servers.values():
            server.awake()
    summary = summarise(turns)
    write_report(args.out / "report.json", {"summary": summary, "turns": turns}, args)
    print(json.dumps(summary, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
