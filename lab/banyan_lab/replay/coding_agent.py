# SPDX-License-Identifier: Apache-2.0
"""Coding-agent sessions with run-length coded block hashes and think times (kv-cache-tester's format).

One session a line; block ids are local to it, its subagents included. Sessions have no common clock: they begin one
after the other, ``gap_s`` apart on average (Poisson). A subagent is a session of its own, started when its parent
started it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import Any

from banyan_lab.replay.lines import json_lines, naming
from banyan_lab.replay.trace import MAX_TOKENS, Runs, Trace, TraceRequest

DEFAULT_GAP_S = 30.0


def load(path: Path, *, gap_s: float = DEFAULT_GAP_S, seed: int = 0) -> Trace:
    """Read a trace.

    Raises:
        TraceError: for a line that is no such session, or when sessions disagree about the block size.
    """
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    block_tokens = 0
    start_s = 0.0
    for number, line in json_lines(path):
        with naming(path, number, "not a coding-agent session"):
            if block_tokens not in (0, line["block_size"]):
                raise ValueError(f"block_size {line['block_size']}, before it was {block_tokens}")
            block_tokens = index(line["block_size"])
            if not 1 <= block_tokens <= MAX_TOKENS:
                raise ValueError(f"block_size {block_tokens}: at least 1, at most {MAX_TOKENS}")
            requests.extend(_session(line["requests"], str(line["id"]), str(line["id"]), start_s, block_tokens))
        start_s += rng.expovariate(1 / gap_s)
    requests.sort(key=lambda request: request.at_s)
    return Trace(path.name.partition(".")[0], block_tokens or 1, tuple(requests))


def _session(
    entries: list[dict[str, Any]], session: str, scope: str, start_s: float, block_tokens: int
) -> Iterator[TraceRequest]:
    turn = 0
    for entry in entries:
        at_s = start_s + float(entry["t"])
        if "requests" in entry:
            yield from _session(entry["requests"], f"{session}/{entry['agent_id']}", scope, at_s, block_tokens)
            continue
        yield TraceRequest(
            session=session,
            turn=turn,
            at_s=at_s,
            num_input_tokens=int(entry["in"]),
            # An answer that was broken off is recorded with no token; one is the least that can be asked for.
            num_output_tokens=max(1, int(entry["out"])),
            blocks=_blocks(entry, block_tokens),
            scope=scope,
            think_s=float(entry.get("think_time", 0.0)) if turn else None,
        )
        turn += 1


def _blocks(entry: dict[str, Any], block_tokens: int) -> Runs:
    """Of a prompt, and no more than it has: a run of a few bytes may name more blocks than memory holds."""
    runs = tuple((index(first), index(count)) for first, count in entry["hash_rle"])
    num_named, num_blocks = sum(count for _, count in runs), -(-int(entry["in"]) // block_tokens)
    if num_named > num_blocks or any(count < 0 for _, count in runs):
        raise ValueError(f"runs of {num_named} blocks in all, or of less than none; the prompt has {num_blocks}")
    return runs
