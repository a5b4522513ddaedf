# SPDX-License-Identifier: Apache-2.0
"""Text files, gzipped or not, line by line, with the place of an error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from banyan_lab.replay.trace import TraceError

GZIP_MAGIC = b"\x1f\x8b"


def open_text(path: Path) -> IO[str]:
    """Open for reading, unpacking what is gzipped.

    Raises:
        TraceError: when the file cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        return gzip.open(path, "rt", encoding="utf-8") if is_gzip else open(path, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file of JSON lines; empty lines are passed over.

    Raises:
        TraceError: for a line that is no object.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path.name}:{number}: {error}") from error
            if not isinstance(value, dict):
                raise TraceError(f"{path.name}:{number}: a JSON object is wanted, not {type(value).__name__}")
            yield number, value
