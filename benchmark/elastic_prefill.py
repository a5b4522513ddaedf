# SPDX-License-Identifier: Apache-2.0
"""A heavy prompt of a session whose rank is decoding: computed there, sent away whole, or computed away and fetched?

    python -m benchmark.elastic_prefill

One server of two ranks. In each turn a session asks a short question, another request then decodes on the same rank,
and the session asks a heavy one (new random tokens behind the first question), then a short follow-up. The ways:

    stay    the session's rank computes the heavy prompt (policy session_sticky)
    policy  the server's default policy places the request; it may go to the idle rank, whole
    detour  the idle rank computes the prompt, the session's rank fetches it and answers (elastic prefill)

Reported: the longest gap between two tokens of the decode beside it, the heavy request's time to first token and the
time between its tokens, and the follow-up's time to first token. Writes build/elastic-prefill/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from banyan.cli.engine import Engine, policy_hints
from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.measure import flush_cache
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.prefill_stall import DECODE_PROMPT_TOKENS, SERVER_ARGS, TIMEOUT_S, summarise
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.workload.generated import random_ids

MIN_NEW_TOKENS = 1000
WAYS: Mapping[str, Mapping[str, Any]] = {
    "stay": {"policy": "session_sticky", "elastic_prefill_tokens": None},
    "policy": {"elastic_prefill_tokens": None},
    "detour": {"elastic_prefill_tokens": MIN_NEW_TOKENS},
}


async def one_turn(url: str, way: str, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """A decode with one heavy prompt beside it; times in seconds."""
    await flush_cache(url)
    session_name = f"{way} {rng.random()}"
    first_ids = random_ids(rng, args.first_tokens)
    heavy_ids = [*first_ids, *random_ids(rng, args.heavy_tokens)]
    async with open_session(TIMEOUT_S) as session:
        asks = NativeClient(session, url, {"kv_hints": policy_hints(WAYS[way])})
        first = await asks.answer((), first_ids, 1, routing_key=session_name)
        beside = NativeClient(session, url, {"routed_dp_rank": first.dp_rank})
        decode = asyncio.create_task(beside.answer((), random_ids(rng, DECODE_PROMPT_TOKENS), args.decode_tokens))
        await asyncio.sleep(args.head_start_s)
        heavy = await asks.answer((), heavy_ids, args.answer_tokens, routing_key=session_name)
        still_decoding = not decode.done()
        follow_up = await asks.answer((), [*heavy_ids, *random_ids(rng, 50)], 1, routing_key=session_name)
        decoded = await decode
    errors = [one.error for one in (first, heavy, follow_up, decoded) if one.error]
    if errors or not still_decoding:
        raise RuntimeError(f"the turn says nothing: {errors or 'the decode ended first, raise --decode-tokens'}")
    assert heavy.ttft_s is not None and follow_up.ttft_s is not None
    return {
        "longest_stall_s": max(decoded.itl_s),
        "heavy_ttft_s": heavy.ttft_s,
        "heavy_itl_s": statistics.median(heavy.itl_s),
        "follow_up_ttft_s": follow_up.ttft_s,
        "ranks": [first.dp_rank, heavy.dp_rank, follow_up.dp_rank],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.elastic_prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--first-tokens", type=int, default=500)
    parser.add_argument("--heavy-tokens", type=int, default=3000)
    parser.add_argument("--answer-tokens", type=int, default=50)
    parser.add_argument("--decode-tokens", type=int, default=600)
    parser.add_argument("--head-start-s", type=float, default=2.0, help="how long the decode runs before")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/elastic-prefill"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    turns: list[dict[str, Any]] = []
    spec = ServerSpec("elastic", 2, "on", SERVER_ARGS, cpu_env(dp=2))
    with Server(spec, ensure_model(DEFAULT_TARGET), args.out / "logs") as server:
        wait_ready([server])
        engine = Engine(server.url)
        for rank in engine.ranks():
            # A rank that has computed nothing does not know how fast it is.
            engine.prefill(random_ids(random.Random(rank), 1000), rank=rank)
        for repetition in range(1, args.repetitions + 1):
            for way in order_of_repetition(list(WAYS), repetition):
                before = _detours(engine)
                # The same prompts for every way.
                turn = asyncio.run(one_turn(server.url, way, args, random.Random(f"{args.seed} {repetition}")))
                turns.append({"label": way, "repetition": repetition, "detours": _detours(engine) - before, **turn})
                print(json.dumps(turns[-1]), flush=True)
    summary = summarise(turns)
    write_report(args.out / "report.json", {"summary": summary, "turns": turns}, args)
    print(json.dumps(summary, indent=2))
    return 0


def _detours(engine: Engine) -> int:
    return sum(int(rank["placed_detour"]) for rank in engine.ranks().values())


if __name__ == "__main__":
    sys.exit(main())
