# SPDX-License-Identifier: Apache-2.0
"""A kept run as a page shows it: its rows, and below them where and how it ran."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

COLUMNS = 118


def kept_table(head: str, rows: Iterable[str], conditions: str) -> str:
    """Markdown. ``head`` and each row are lines of a table."""
    rule = "|" + "---|" * (head.count("|") - 1)
    lines = "\n".join((head, rule, *rows))
    return f"{lines}\n\n{textwrap.fill(conditions, COLUMNS)}\n"
