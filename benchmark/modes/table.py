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
from benchmark.provenance import MOVED

HEAD = """# Modes of SGLang, and what Banyan does in each

`make modes` starts SGLang's CPU engine in every mode, with a tiny model of random weights. A test compares this page
with the list of modes. The servers are forks of one process that has imported SGLang; from there on they are
`python -m sglang.launch_server`.

- **Served**: each prompt was sent to one rank and then to the next, of a server with Banyan and of one that shares
  nothing, and the outputs were equal. *device*, *peer*, *host* and *storage*: cached tokens from the rank's own pool,
  another rank's pool, host memory and the store. *Hits to one rank's*: tokens found when the prompts were sent again,
  over those that a server with a single rank finds; empty if there was no such server. *Both at work*: for ranks in
  step (data-parallel attention), the largest change of log-probability when all ranks compute at once.
- **Refused**: the server ends at its start, with this line.
- **Not run**: the machine of the run lacks what the mode needs; nothing is claimed about it.

No row was run with a published checkpoint. Of those only SmolLM2-135M was served ([benchmarks.md](benchmarks.md)).

"""
EXERCISED = (
    f"A served row is asked {NUM_PROMPTS} prompts of {SHORTEST} to {LONGEST} tokens, one at a time (ranks in step also "
    "together). So the rows {idle} show that a server with the flag starts and shares, and no more: no batch is mixed "
    "there, no queue ordered."
)
SERVED_HEAD = """
## Served

| mode | flags | model | device | peer | host | storage | outputs | hits to one rank's |
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

These have neither a row nor an end-to-end test: retraction of running requests, preemption by priority, several
adapters or adapters that are loaded while the server runs, two-batch overlap alone, sessions that stream, quantised
weights, weight updates other than from disk and from tensors, `torch.compile`, hidden states, parsers of reasoning,
parsed tool calls, AMD's GPUs and NPUs.

SGLang does beam search (`sampling_params`: `beam_width`) in pages of one token only: a server with Banyan answers it
with 400, unless it has `--banyan-share off` and `--page-size 1`.
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
    ran = [row for row in rows if row["verdict"] != "needs"]
    runs = Counter(row.get("where", "a commit that was not kept") for row in ran)
    said = "; ".join(f"{count} row{'s' * (count > 1)} at {where}" for where, count in runs.items()) or "none"
    said += f"; {len(rows) - len(ran)} did not run." if len(ran) < len(rows) else "."
    if any(MOVED in where for where in runs):
        said += f" `{MOVED}`: the checkout changed during the run; the commit is that of its start."
    return "\n" + _wrapped(f"Runs: {said}")


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
