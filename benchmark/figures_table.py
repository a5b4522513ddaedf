# SPDX-License-Identifier: Apache-2.0
"""Figures of a kept run beside their aims, as a table of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.kept_table import wrapped
from benchmark.metrics import ranged


def figures_table(run: Mapping[str, Any], aims: Mapping[str, str], conditions: str) -> str:
    """A row for each of ``aims``, which ``run`` has to have, and under them where it ran."""
    rows = "\n".join(f"| `{name}` | {_cell(run[name])} | {aim} |" for name, aim in aims.items())
    return f"| figure | found | aim |\n|---|---|---|\n{rows}\n\n{wrapped(conditions)}\n"


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ranged(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
