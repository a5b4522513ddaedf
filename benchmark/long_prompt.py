# SPDX-License-Identifier: Apache-2.0
"""A prompt as long as large models take: is it found in the other rank's pool, in the arena and in the store, and are
its tokens the same?

    python -m benchmark.long_prompt --tokens 100000
    python -m benchmark.long_prompt --tokens 8000 --shape eight-b       # 1 GiB of keys and values

A tiny random model with a long context, or one with layers and pages as Llama 3 8B has them. The prompt is computed by
a server that shares nothing, and by a rank of one that shares; then the other rank is asked; then a rank whose pool has
lost it to others; then the server that was started again on the store. Some minutes. Writes
build/long-prompt/report.json.
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

SHAPES = {shape.name: shape for shape in (models.LONG, models.EIGHT_B)}
DTYPES = {models.LONG.name: "float32", models.EIGHT_B.name: "bfloat16"}
TOKEN_BYTES = {models.LONG.name: 1 << 10, models.EIGHT_B.name: 128 << 10}
"""Of keys and values in all layers."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.long_prompt", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--shape", choices=SHAPES, default=models.LONG.name, help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/long-prompt"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    rng = random.Random(args.seed)
    asked = random_prompt(rng, args.tokens)
    others = [random_prompt(rng, OTHER_TOKENS) for _ in range(num_others(args))]
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


def num_others(args: argparse.Namespace) -> int:
    """As many as fill the pools of all ranks."""
    return NUM_RANKS * -(-pool_tokens(args) // OTHER_TOKENS)


def tier_gb(args: argparse.Namespace) -> int:
    """GiB that hold all prompts."""
    num_tokens = args.tokens + num_others(args) * OTHER_TOKENS
    return 1 + -(-num_tokens * TOKEN_BYTES[args.shape] // (1 << 30))


def server(label: str, args: argparse.Namespace, *more: str) -> StoreServer:
    flags = (
        *("--context-length", str(max(args.tokens, OTHER_TOKENS) + 64), "--max-total-tokens", str(pool_tokens(args))),
        *("--chunked-prefill-size", "4096", "--dtype", DTYPES[args.shape]),
        *("--banyan-host-gb", str(tier_gb(args)), "--banyan-store-gb", str(tier_gb(args))),
        *more,
    )
    model = models.ensure(SHAPES[args.shape])
    return StoreServer(label, args.out / "store", model, args.out / "logs", dp=NUM_RANKS, args=flags)


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
