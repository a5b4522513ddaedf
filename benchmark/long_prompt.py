# SPDX-License-Identifier: Apache-2.0
"""A prompt as long as large models take: is it found in the other rank's pool, in the arena and in the store, and are
its tokens the same?

    python -m benchmark.long_prompt --tokens 100000

A tiny random model with a long context. The prompt is computed by a server that shares nothing, and by a rank of one
that shares; then the other rank is asked; then a rank whose pool has lost it to others; then the server that was
started again on the store. Some minutes. Writes build/long-prompt/report.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.modes import models
from benchmark.modes.models import random_prompt
from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm
from benchmark.store_server import Answer, StoreServer

PAGE_TOKENS = 16
NUM_RANKS = 2
OUTPUT_TOKENS = 16
OTHER_TOKENS = 4_000
"""Of each prompt that takes the long one's place in a pool."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.long_prompt", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/long-prompt"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    rng = random.Random(args.seed)
    asked = random_prompt(rng, args.tokens)
    num_others = NUM_RANKS * -(-pool_tokens(args) // OTHER_TOKENS)
    others = [random_prompt(rng, OTHER_TOKENS) for _ in range(num_others)]
    with server("off", args, "--banyan-share", "off") as off:
        expected = off.ask(asked, rank=0, num_tokens=OUTPUT_TOKENS)
    answers = {"computed alone": expected}
    with server("on", args) as on:
        answers["computed"] = on.ask(asked, rank=0, num_tokens=OUTPUT_TOKENS)
        answers["from the other rank"] = on.ask(asked, rank=1, num_tokens=OUTPUT_TOKENS)
        for number, other in enumerate(others):
            on.ask(other, rank=number % NUM_RANKS)
        answers["from the arena"] = on.ask(asked, rank=1, num_tokens=OUTPUT_TOKENS)
        on.wait_stored(args.tokens // PAGE_TOKENS)
        scheduler = hooks(on)
    with server("again", args) as again:
        answers["from the store"] = again.ask(asked, rank=0, num_tokens=OUTPUT_TOKENS)
    rows = [row(name, answer, expected) for name, answer in answers.items()]
    write_report(args.out / "report.json", {"rows": rows, "scheduler_us": scheduler}, args)
    shutil.rmtree(args.out / "store", ignore_errors=True)
    print("\n".join(map(json.dumps, rows)))
    return 0 if all(one["same_tokens"] for one in rows) else 1


def pool_tokens(args: argparse.Namespace) -> int:
    """Of a rank: the long prompt and little beside it."""
    return args.tokens + 3 * OTHER_TOKENS


def server(label: str, args: argparse.Namespace, *more: str) -> StoreServer:
    flags = (
        *("--context-length", str(args.tokens + 64), "--max-total-tokens", str(pool_tokens(args))),
        *("--chunked-prefill-size", "4096", "--dtype", "float32", "--banyan-host-gb", "1", "--banyan-store-gb", "2"),
        *more,
    )
    return StoreServer(
        label, args.out / "store", models.ensure(models.LONG), args.out / "logs", dp=NUM_RANKS, args=flags
    )


def hooks(one: StoreServer) -> dict[int, int]:
    """What each rank's scheduler thread has spent in Banyan's hooks, for all that it was asked."""
    return {number: rank["control_us"] for number, rank in one.engine.ranks().items()}


def row(name: str, answer: Answer, expected: Answer) -> dict[str, Any]:
    return {
        "prompt": name,
        "seconds": round(answer.ttft_s, 3),
        "cached": answer.details,
        "same_tokens": answer.tokens == expected.tokens,
    }


if __name__ == "__main__":
    sys.exit(main())
