# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation that are read off the product: its knobs, its figures, and the router's paths."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from banyan import knobs
from banyan.router.paths import OTHER, ROWS, By, To
from banyan.telemetry import SERIES


def knob_table(settings: type, group: str) -> str:
    """The knobs of one group as a Markdown table."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for _, default, one in knobs.knobs_of(settings):
        if one.group == group:
            rows.append(f"| `{_usage(one)}` | {_shown_as_code(default, one)} | {one.text} |")
    return "\n".join(rows) + "\n"


def _usage(one: knobs.Knob) -> str:
    if one.switches_to is not None:
        return one.flag
    argument = "\\|".join(one.choices) if one.choices and not one.metavar else one.metavar.replace("|", "\\|")
    return f"{one.flag} [{argument}]" if one.const is not None else f"{one.flag} {argument}"


def _shown_as_code(default: Any, one: knobs.Knob) -> str:
    text = knobs.shown(default, one)
    return f"`{text}`" if isinstance(default, str) and not one.unset else text


def path_table() -> str:
    """The rows for people, those that are alike together: a part of ``docs/router.md``."""
    groups: dict[tuple[To, By, bool], list[str]] = {}
    for row in (*ROWS, OTHER):
        groups.setdefault((row.to, row.by, row.is_ours), []).append(row.path)
    lines = ["| paths | go to | placed by |", "|---|---|---|"]
    for (to, by, is_ours), paths in groups.items():
        named = ", ".join(f"`{path}`" if path != OTHER.path else "any other path" for path in paths)
        whom = f"{to.value}. Only this machine may ask" if is_ours else to.value
        lines.append(f"| {named} | {whom} | {by.value} |")
    return "\n".join(lines) + "\n"


def figure_table(page: str, made: str) -> str:
    """What ranks tell and ``page`` does not name, but for the table itself, which stands behind ``made`` there."""
    before, _, behind = page.partition(f"<!-- made: {made} -->")
    named = set(re.findall(r"`([a-z0-9_*]+)`", before + behind.partition("<!-- end -->")[2]))
    lines = ["| figure | meaning |", "|---|---|"]
    for name, series in SERIES.items():
        names = (name, name.removeprefix("store_"))
        if not any(fnmatchcase(one, pattern) for one in names for pattern in named):
            lines.append(f"| `{name}` | {series.text} |")
    return "\n".join(lines) + "\n"
