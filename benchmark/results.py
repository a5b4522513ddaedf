# SPDX-License-Identifier: Apache-2.0
"""Result files: JSON lines, one per request (`kind: request`) and one per run (`kind: run`); or one report.

A line is written whole and synced before the next measurement goes on, so a crash costs at most the run it
hit; a torn last line of an earlier crash is closed off before anything is appended.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmark.provenance import provenance


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append `lines` to `path` (made with its folder if missing) and sync them to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    with open(path, "ab") as file:
        if _is_torn(path):
            file.write(b"\n")
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of `path`; what a crash left half-written is skipped."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def write_report(path: Path, found: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Write what was found, with the options and the provenance, to `path` (its folder is made if missing). The commit
    is that at which the program began."""
    # Paths tell about a machine, names about a measurement.
    config = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**found, "config": config, "provenance": provenance()}, indent=1) + "\n")


def _is_torn(path: Path) -> bool:
    if path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
