# SPDX-License-Identifier: Apache-2.0
"""A kept run as a page shows it: its rows, and below them where and how it ran."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

COLUMNS = 118


def kept_page(path: Path, page: Callable[[Mapping[str, Any]], str]) -> str:
    """The page of the run that is kept there."""
    return page(json.loads(path.read_text()))


def kept_table(head: str, rows: Iterable[str], conditions: str) -> str:
    """Markdown. ``head`` and each row are lines of a table."""
    rule = "|" + "---|" * (head.count("|") - 1)
    lines = "\n".join((head, rule, *rows))
    return f"{lines}\n\n{wrapped(conditions)}\n"


def wrapped(text: str) -> str:
    """Without a break within a flag."""
    return textwrap.fill(text, COLUMNS, break_on_hyphens=False)


def command_of(module: str, config: Mapping[str, Any]) -> str:
    """The command that gives this kept ``config``, whose names are those of the options of ``module``, and whose lists
    stand behind one flag each. Where results went is left out."""
    words = ["python", "-m", module]
    for name, value in config.items():
        if name != "out" and value is not None and value is not False:
            words += (f"--{name.replace('_', '-')}", *_values(value))
    return shlex.join(words)


def _values(value: Any) -> Iterator[str]:
    """What stands behind a flag; nothing behind a switch."""
    if value is not True:
        yield from map(str, value if isinstance(value, list) else [value])
