# SPDX-License-Identifier: Apache-2.0
"""`docs/compatibility.md` from what `make modes` has found: a row for each mode, and nothing that was not seen."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.modes.asking import LONGEST, NUM_PROMPTS, SHORTEST, SOURCES
from benchmark.modes.rows import ADAPTER, DRAFT, DRAFT_OF_LAYERS, MODEL, MODES, PORT, STORE, Mode

HEAD = """# Modes of SGLang, and what Banyan does in each

Made by `make modes`, which starts every mode on SGLang's CPU engine with a tiny model of random weights; a test keeps
the list of modes true. *Served*: prompts were asked at one rank and then at the next; the outputs were those of a
server that shares nothing, and cached tokens came from where the columns say. *Refused*: the server does not start, and
this is the line. *Not run*: this needs what the machine of the run does not have; nothing is claimed about it. The
servers are forks of one process that has SGLang imported; from there on they are `python -m sglang.launch_server`.

"""
EXERCISED = (
    f"A served row is asked {NUM_PROMPTS} prompts of {SHORTEST} to {LONGEST} tokens, one at a time (ranks in step also "
    "together). So the rows {idle} show that a server with the flag starts and shares, and no more: no batch is mixed "
    "there, no queue ordered."
)
SERVED_HEAD = """
## Served

| mode | flags | model | device | peer | host | storage | outputs | of one rank's hits |
|---|---|---|---|---|---|---|---|---|
"""
REFUSED_HEAD = """
## Refused

| mode | flags | line |
|---|---|---|
"""
NEEDS_HEAD = """
## Not run

| mode | flags | needs |
|---|---|---|
"""


WITHOUT_A_ROW = """
## Without a row

These have neither a row nor an end-to-end test: several answers to a prompt (`n` above 1), log probabilities of the
prompt, retraction of running requests, preemption by priority, several adapters or adapters that are loaded while the
server runs, two-batch overlap alone, sessions that stream, quantised weights, weight updates other than from disk and
from tensors, `torch.compile`, hidden states, parsers of tools and reasoning, AMD's GPUs and NPUs.
"""
NOT_EXERCISED = ("no overlap of scheduler and forward", "priorities", "longest prefix first", "mixed chunks")
"""Modes that only act where several requests wait or run, which the harness never brings about."""

NOT_YET = "a run of `make modes` on this revision"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page; `rows` are those of the report. A mode without a row there stands among those not run."""
    found = {row["mode"]: row for row in rows}
    served, refused = ([mode for mode in MODES if _verdict(mode, found) == one] for one in ("served", "refused"))
    others = [mode for mode in MODES if mode not in served and mode not in refused]
    return (
        HEAD
        + _wrapped(EXERCISED.format(idle=", ".join(f"*{name}*" for name in NOT_EXERCISED)))
        + _runs(rows)
        + SERVED_HEAD
        + "".join(_served_line(mode, found[mode.name]) for mode in served)
        + REFUSED_HEAD
        + "".join(f"| {mode.name} | {_flags(mode)} | {_cell(found[mode.name]['line'])} |\n" for mode in refused)
        + NEEDS_HEAD
        + "".join(f"| {mode.name} | {_flags(mode)} | {mode.needs or NOT_YET} |\n" for mode in others)
        + WITHOUT_A_ROW
    )


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    """On which commits, days and machines how many of the rows ran."""
    runs = Counter(row.get("where", "a commit that was not kept") for row in rows)
    return "\n" + _wrapped(f"Runs: {'; '.join(f'{count} rows at {where}' for where, count in runs.items()) or 'none'}.")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def _verdict(mode: Mode, found: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What the report says of a mode, where it says what the list says."""
    row = found.get(mode.name)
    return mode.verdict if row is not None and row["verdict"] == mode.verdict else None


def _served_line(mode: Mode, row: Mapping[str, Any]) -> str:
    tokens = " | ".join(str(row["tokens_from"][source]) for source in SOURCES)
    share = row["share_of_one_rank"]
    outputs = "identical"
    if row["largest_logit_difference"] is not None:
        outputs += f"; both at work: within {row['largest_logit_difference']:.4f}"
    return (
        f"| {mode.name} | {_flags(mode)} | {mode.model} | {tokens} | {outputs} | {'' if share is None else share} |\n"
    )


def listed(text: str) -> list[tuple[str, str]]:
    """Mode and flags of every row of a page, sorted."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| mode ")]
    return sorted((cells[0].removeprefix("| "), cells[1]) for cells in rows)


def expected() -> list[tuple[str, str]]:
    """What `listed` must give for a page that is up to date."""
    return sorted((mode.name, _flags(mode)) for mode in MODES)


def _flags(mode: Mode) -> str:
    words = [*(f"{name}={value}" for name, value in mode.env), *map(_shown, mode.flags)]
    return f"`{' '.join(words)}`" if words else "-"


def _cell(line: str) -> str:
    return line.replace("|", "\\|")


def _shown(flag: str) -> str:
    """Without the paths of the machine of the run."""
    words = {
        **dict.fromkeys((STORE, ADAPTER, DRAFT, DRAFT_OF_LAYERS), "FOLDER"),
        **{MODEL: "MODEL", PORT: "PORT"},
    }
    return functools.reduce(lambda said, name: said.replace(name, words[name]), words, flag)
