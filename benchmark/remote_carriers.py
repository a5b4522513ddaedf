# SPDX-License-Identifier: Apache-2.0
"""The same prefixes through the page server (over TCP, and by NIXL over TCP), a Mooncake store and a shared mount, side
by side: what each is worth, and takes.

    python -m benchmark.remote --carriers

Four pairs of servers (`carriers`) take turns in an order that rotates; who has no turn is stopped. In a turn all
caches are empty. The writer answers a prompt, and is looked at until its pages can be had; then the reader is asked it
once as it is and once under a salt (it is nowhere), in alternating order, one request at a time. Short prompts follow,
which the reader is asked so long after the writer's answer, while nobody looks at the writer: it sleeps when idle, and
does not publish in its sleep. The prompts are the same for every carrier. At the end the writers are killed, and then
who else holds the bytes, and the readers are asked prompts that they have not seen. Answers are compared with the
writer's. Processor time is of all processes of a pair, Mooncake's too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan.planner import Action
from benchmark.carriers import KINDS, PAGE_TOKENS, POLL_S, Pair, Taken
from benchmark.carriers_summary import summarise
from benchmark.compare import order_of_repetition
from benchmark.processes import turn_of
from benchmark.remote_nodes import NUM_OUTPUT_TOKENS
from benchmark.store_server import prompts

PROMPT_TOKENS = 1600
NUM_PROMPTS = 4
SHORT_TOKENS = 400
DELAYS_S = (0.0, 0.5, 1.5)
NUM_AFTER_KILL = 2

Row = dict[str, Any]


@dataclass(frozen=True)
class Spent:
    """One request at the reader."""

    took_s: float
    cpu_s: float
    stall_s: float
    num_tokens: int

    def named(self, way: str) -> Row:
        return {f"{way}_s": self.took_s, f"{way}_cpu_s": self.cpu_s, f"{way}_stall_s": self.stall_s}


def _take(pair: Pair, ids: Sequence[int], **asked: Any) -> Spent:
    """Its answer of one token. Stall: what the forward waited for layers."""
    cpu_s, wait_us = pair.cpu_s(), pair.reader.ranks()[0]["wait_us"]
    started_s = time.perf_counter()
    answer = pair.reader.generate(ids, **asked)
    took_s = time.perf_counter() - started_s
    cpu_s = pair.cpu_s() - cpu_s
    details = answer["meta_info"]["cached_tokens_details"] or {}
    stall_s = (pair.reader.ranks()[0]["wait_us"] - wait_us) / 1e6
    return Spent(took_s, cpu_s, stall_s, details.get(pair.carrier.source, 0))


def _write(pair: Pair, ids: Sequence[int]) -> Row:
    """Have the writer compute a prompt: how long after its answer the reader can have it, and what all that cost."""
    wanted = pair.num_to_be_had() + len(ids) // PAGE_TOKENS
    cpu_s, started_s = pair.cpu_s(), time.perf_counter()
    pair.writer.generate(ids)
    answered_s = time.perf_counter()
    pair.until(lambda: pair.num_to_be_had() >= wanted, POLL_S)
    lag_s = time.perf_counter() - answered_s
    return {"write_s": answered_s - started_s, "lag_s": lag_s, "write_cpu_s": pair.cpu_s() - cpu_s}


def _output(pair: Pair, ids: Sequence[int]) -> list[int]:
    """The writer's answer; its cache holds the prompt."""
    return list(pair.writer.generate(ids, num_tokens=NUM_OUTPUT_TOKENS)["output_ids"])


def _is_identical(pair: Pair, ids: Sequence[int], expected: list[int]) -> bool:
    return list(pair.reader.generate(ids, num_tokens=NUM_OUTPUT_TOKENS)["output_ids"]) == expected


def measure_prompt(pair: Pair, ids: Sequence[int], repeat: int, number: int) -> Row:
    """Both ways, the first one taking turns; then the tokens."""
    row: Row = {"carrier": pair.carrier.name, "repeat": repeat, "prompt": number, **_write(pair, ids)}
    expected = _output(pair, ids)
    for way in ("carried", "compute") if (number + repeat) % 2 else ("compute", "carried"):
        if way == "compute":
            row |= _take(pair, ids, action=Action.COMPUTE, cache_salt=f"again-{repeat}-{number}").named(way)
        else:
            spent = _take(pair, ids)
            row |= {**spent.named(way), "carried_tokens": spent.num_tokens}
    return {**row, "is_identical": _is_identical(pair, ids, expected)}


def measure_alone(pair: Pair, ids: Sequence[int], repeat: int, delay_s: float) -> Row:
    """The reader is asked so long after the writer's answer; nobody looks at the writer meanwhile."""
    expected = pair.writer.generate(ids)["output_ids"]
    time.sleep(delay_s)
    answer = pair.reader.generate(ids)
    details = answer["meta_info"]["cached_tokens_details"] or {}
    return {
        "carrier": pair.carrier.name,
        "repeat": repeat,
        "delay_s": delay_s,
        "token_share": details.get(pair.carrier.source, 0) / len(ids),
        "is_identical": answer["output_ids"] == expected,
    }


def measure_killed(pair: Pair, asked: Sequence[Sequence[int]]) -> list[Row]:
    """Prompts that can be had, asked for when the writer is gone, and others when the bytes' holder is too."""
    kills = {"writer": pair.kill_writer, **pair.carrier.holders()}
    asked = asked[: len(kills) * NUM_AFTER_KILL]
    expected = []
    for ids in asked:
        _write(pair, ids)
        expected.append(_output(pair, ids))
    rows = []
    for number, (who, kill) in enumerate(kills.items()):
        kill()
        mine = slice(number * NUM_AFTER_KILL, (number + 1) * NUM_AFTER_KILL)
        rows += [_asked_after(who, pair, *both) for both in zip(asked[mine], expected[mine], strict=True)]
    return rows


def _asked_after(killed: str, pair: Pair, ids: Sequence[int], expected: list[int]) -> Row:
    spent = _take(pair, ids)
    row = {"carrier": pair.carrier.name, "killed": killed, "took_s": spent.took_s, "carried_tokens": spent.num_tokens}
    return _said({**row, "is_identical": _is_identical(pair, ids, expected)})


def _said(row: Row) -> Row:
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    print(f"[carriers] {shown}", file=sys.stderr, flush=True)
    return row


def measure(model: Path, out: Path, num_repeats: int, seed: int) -> Mapping[str, Any]:
    """Every carrier with every prompt, in turns; what the run came to, and its rows."""
    rows: list[Row] = []
    alone: list[Row] = []
    killed: list[Row] = []
    taken: dict[str, Taken] = {}
    lengths = [PROMPT_TOKENS] * NUM_PROMPTS + [SHORT_TOKENS] * len(DELAYS_S)
    with ExitStack() as stack:
        pairs = {name: _started(name, model, out, stack) for name in KINDS}
        for repeat in range(num_repeats):
            asked = prompts(model, lengths, seed=seed + repeat)
            for name in order_of_repetition(list(pairs), repeat + 1):
                with turn_of(pairs[name]):
                    for number, ids in enumerate(asked[:NUM_PROMPTS]):
                        rows.append(_said(measure_prompt(pairs[name], ids, repeat, number)))
                    taken[name] = pairs[name].carrier.taken(pairs[name])
                    for delay_s, ids in zip(DELAYS_S, asked[NUM_PROMPTS:], strict=True):
                        alone.append(_said(measure_alone(pairs[name], ids, repeat, delay_s)))
        asked = prompts(model, [PROMPT_TOKENS] * (2 * NUM_AFTER_KILL), seed=seed + num_repeats)
        for pair in pairs.values():
            with turn_of(pair):
                killed += measure_killed(pair, asked)
    found = summarise(rows, alone, killed, taken, PROMPT_TOKENS)
    sizes = {"prompt_tokens": PROMPT_TOKENS, "short_tokens": SHORT_TOKENS, "page_tokens": PAGE_TOKENS}
    sizes |= {"num_prompts": NUM_PROMPTS, "num_repeats": num_repeats}
    return {**found, "sizes": sizes, "rows": rows, "alone_rows": alone, "killed_rows": killed}


def _started(name: str, model: Path, out: Path, stack: ExitStack) -> Pair:
    """Asleep, and ended with the ``stack``."""
    carrier = KINDS[name](out)
    stack.callback(carrier.close)
    return stack.enter_context(Pair(carrier, model, out / "logs"))
