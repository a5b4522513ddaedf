# SPDX-License-Identifier: Apache-2.0
"""What runs find with half of an arena, with all of it and with twice, beside what a rank of the middle one tells.

    python -m benchmark.ceiling_runs --data FOLDER

A server of one rank and a tiny model is asked for recorded prompts, one after the other in their order, and starts anew
for each size. What half, the same and twice would find is what the rank of the middle run says at its end. Each run is
also held to its counters: the tokens that were cached, and those that were computed, by reason, are those of the
prompts. Nothing is timed. Leaves build/ceiling-runs.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from banyan_lab.replay import Sampling, Scale, Synthesis, Trace, Vocabulary, formats, sampled, scaled
from benchmark.ceiling import TIMES
from benchmark.engine import Engine
from benchmark.kept_table import command_of, kept_table
from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.provenance import place_and_time
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, cpu_env, unwind_on_sigterm, wait_ready

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "ceiling_runs.json"
HEAD = "| trace | prompts | arena, pages | found | reported | off, points | reported ceiling |"

PAGE_TOKENS = 16
POOL_PAGES = 1024
MOST_PROMPT_TOKENS = 14_000
"""Longer prompts have no room in the pool."""

CACHED = ("own_tokens", "peer_tokens", "host_tokens", "store_tokens")


@dataclass(frozen=True)
class Work:
    """A recording, and how its blocks become pages. ``arena_pages``: of the middle run."""

    path: str
    block_tokens: int
    num_requests: int
    arena_pages: int


WORKS = (
    Work("claude_code_traces/claude_code_a.jsonl.gz", 64, 1_500, 1_024),
    Work("mooncake/conversation_trace.jsonl.gz", 512, 1_500, 4_096),
    Work("lmcache_agent_trace/miniswe.jsonl.gz", 16, 402, 512),
)


def trace_of(work: Work, data: Path) -> Trace:
    """Its blocks are pages."""
    some, _ = sampled(formats.load(data / work.path), Sampling(num_requests=work.num_requests))
    scale = Scale(tokens=PAGE_TOKENS / work.block_tokens, max_input_tokens=MOST_PROMPT_TOKENS)
    return scaled(some, scale)[0]


def run(trace: Trace, arena_pages: int, label: str, folder: Path) -> dict[str, Any]:
    """A server with such an arena is asked for all prompts; what it found and what it tells."""
    vocabulary = Vocabulary(models.FIRST_DRAWN_TOKEN, models.LAST_DRAWN_TOKEN)
    synthesis = Synthesis(vocabulary, block_tokens=trace.block_tokens, seed=0)
    spec = ServerSpec(label, 1, "on", flags(arena_pages), (*cpu_env(dp=1), *ENV))
    with Server(spec, models.ensure(models.LONG), folder) as server:
        wait_ready([server])
        engine = Engine(server.url)
        before = engine.ranks()[0]
        for request in trace.requests:
            engine.generate(synthesis.prompt(request))
        after = engine.ranks()[0]
    return figures(before, after)


def flags(arena_pages: int) -> tuple[str, ...]:
    """Of a server whose arena has so many pages."""
    sizes = ("--max-total-tokens", str(POOL_PAGES * PAGE_TOKENS), "--context-length", str(POOL_PAGES * PAGE_TOKENS))
    arena = ("--banyan-host-gb", f"{arena_pages * page_bytes() / 2**30:.9f}")
    return ("--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE_TOKENS), *sizes, *arena)


def page_bytes() -> int:
    """Keys and values of a page of the model, in float32."""
    fields = {**models.COMMON, **models.LONG.fields}
    numbers = fields["num_hidden_layers"] * 2 * fields["num_key_value_heads"] * fields["head_dim"]
    return int(4 * numbers * PAGE_TOKENS)


def figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Of one run."""
    names = [name for name in after if name in CACHED or (name.startswith("computed_") and name.endswith("_tokens"))]
    tokens = {name: after[name] - before[name] for name in names}
    prompt_tokens = after["prompt_tokens"] - before["prompt_tokens"]
    return {
        "arena_pages": after["num_arena_frames"],
        "prompt_tokens": prompt_tokens,
        "tokens": {name: number for name, number in tokens.items() if number},
        "without_reason": prompt_tokens - sum(tokens.values()),
        "found": round(sum(tokens[name] for name in CACHED) / prompt_tokens, 4),
        "told": {word: after[f"hit_share_{word}"] for word in TIMES},
        "ceiling": after["hit_ceiling_24h"],
    }


def rows(work: Work, data: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """A run for each size of the arena."""
    trace = trace_of(work, data)
    for word, times in TIMES.items():
        pages = int(times * work.arena_pages)
        shape = {"trace": trace.name, "num_prompts": len(trace.requests), "pool_pages": POOL_PAGES, "arena": word}
        yield {**shape, **run(trace, pages, f"{trace.name}-{word}", folder)}


def with_told(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With what the middle run of a trace told of each of its runs."""
    middle = {one["trace"]: one for one in runs if one["arena"] == "same"}
    told = [middle[one["trace"]]["told"][one["arena"]] for one in runs]
    return [{**one, "off": round(share - one["found"], 4)} for one, share in zip(runs, told, strict=True)]


def table() -> str:
    """The rows of the kept run, and where it ran. Written by ``make docs``."""
    kept = json.loads(KEPT.read_text())
    config = {**kept["config"], "data": "FOLDER"}
    conditions = f"`{command_of('benchmark.ceiling_runs', config)}`, {place_and_time(kept['provenance'])}."
    return kept_table(HEAD, map(_row, kept["runs"]), conditions)


def _row(one: Mapping[str, Any]) -> str:
    told = one["found"] + one["off"]
    cells = (
        f"{one['trace']}, {one['arena']}",
        f"{one['num_prompts']:,}",
        f"{one['arena_pages']:,}",
        f"{100 * one['found']:.1f} %",
        f"{100 * told:.1f} %",
        f"{100 * one['off']:+.1f}",
        f"{100 * one['ceiling']:.1f} %",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.ceiling_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded workloads")
    parser.add_argument("--requests", type=int, help="of each recording at most")
    parser.add_argument("--out", type=Path, default=Path("build/ceiling-runs.json"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    runs: list[dict[str, Any]] = []
    for work in WORKS:
        num_requests = min(work.num_requests, args.requests or work.num_requests)
        some = replace(work, num_requests=num_requests)
        for row in rows(some, args.data, args.out.parent / "ceiling-runs-logs"):
            print(row, file=sys.stderr, flush=True)
            runs.append(row)
    write_report(args.out, {"runs": with_told(runs)}, args)
    return 1 if any(one["without_reason"] for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
