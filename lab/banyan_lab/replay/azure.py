# SPDX-License-Identifier: Apache-2.0
"""Arrival times and lengths as Azure publishes them: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Nothing is known of what prompts have in common, so nothing is shared: each request is a session of its own.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from banyan_lab.replay.lines import naming, text_lines
from banyan_lab.replay.trace import Trace, TraceError, TraceRequest

MICROSECOND_DIGITS = 6


def load(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: for a file without these columns, or a row that they do not fit.
    """
    requests = []
    start = None
    for number, row in _rows(path):
        with naming(path, number, "not a length trace"):
            at = _moment(row["TIMESTAMP"])
            num_input_tokens, num_output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            start = start or at
            at_s = (at - start).total_seconds()
            requests.append(TraceRequest(f"s{number}", 0, at_s, num_input_tokens, max(1, num_output_tokens)))
    requests.sort(key=lambda request: request.at_s)
    return Trace(path.name.partition(".")[0], 1, tuple(requests))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows, each with the number of its last line."""
    reader = csv.DictReader(text_lines(path))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise TraceError(f"{path.name}:{reader.reader.line_num}: not a length trace: {error}") from error


def _moment(text: str) -> datetime:
    """A time stamp; digits beyond the microsecond are more than ``datetime`` holds."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '0' * MICROSECOND_DIGITS)[:MICROSECOND_DIGITS]}")
