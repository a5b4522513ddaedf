# SPDX-License-Identifier: Apache-2.0
"""Starts every mode of `rows.MODES`, one after the other, and leaves build/modes/report.json.

    python -m benchmark.modes [--only WORDS] [--resume] [--write-docs]

Correctness, not speed: rows are compared with servers that share nothing. Exit status 1 unless every row came out as
the list says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmark.modes import table
from benchmark.modes.asking import LOGIT_TOLERANCE
from benchmark.modes.rows import MODES, Mode
from benchmark.modes.run import Found, run
from benchmark.provenance import place_and_time, provenance
from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm

SHARE_OF_ONE_RANK = 0.97
FOUND = {field.name for field in fields(Found)}


def wrong(mode: Mode, found: Found) -> str | None:
    """Why the row is not as the list says, or None."""
    if found.verdict != mode.verdict:
        return f"{found.verdict} instead of {mode.verdict}: {found.line}"
    if found.outputs_identical is False:
        return "its outputs are not those of a server that shares nothing"
    if (found.largest_logit_difference or 0.0) > LOGIT_TOLERANCE:
        return f"log probabilities differ by {found.largest_logit_difference}"
    if (found.share_of_one_rank or 1.0) < SHARE_OF_ONE_RANK:
        return f"it found {found.share_of_one_rank} of what one rank finds again"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.modes", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has these words")
    parser.add_argument("--resume", action="store_true", help="leave out rows that the report has as the list says")
    parser.add_argument("--out", type=Path, default=Path("build/modes"))
    parser.add_argument("--write-docs", action="store_true", help="write docs/compatibility.md from the report")
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    path = args.out / "report.json"
    rows = _rows_before(path) if args.only or args.resume else {}
    failures = 0
    for mode in MODES:
        if args.only not in mode.name or (args.resume and _is_done(mode, rows.get(mode.name))):
            continue
        found = run(mode, args.out.resolve())
        reason = wrong(mode, found)
        failures += reason is not None
        rows[mode.name] = {"mode": mode.name, "flags": list(mode.flags), "model": mode.model, **asdict(found)}
        rows[mode.name]["where"] = place_and_time(provenance())
        print(f"[modes] {found.wall_s:6.1f} s  {mode.name}: {reason or found.verdict}", flush=True)
        write_report(path, {"rows": list(rows.values())}, args)
    if args.write_docs:
        Path("docs/compatibility.md").write_text(table.page(list(rows.values())))
    return 1 if failures else 0


def _is_done(mode: Mode, row: dict[str, Any] | None) -> bool:
    """Whether a row of the report is of this mode, flags and all, and came out as the list says."""
    if row is None or row["flags"] != list(mode.flags) or row["model"] != mode.model:
        return False
    return wrong(mode, Found(**{name: value for name, value in row.items() if name in FOUND})) is None


def _rows_before(path: Path) -> dict[str, Any]:
    return {row["mode"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
