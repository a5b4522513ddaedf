# SPDX-License-Identifier: Apache-2.0
"""Text files, gzipped or not, line by line, with the place of an error."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from banyan_lab.replay.trace import TraceError

GZIP_MAGIC = b"\x1f\x8b"

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
UNFIT = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What a field that holds something else, or is not there, can raise where it is used."""


def text_lines(path: Path) -> Iterator[str]:
    """Lines, unpacked where they are gzipped.

    Raises:
        TraceError: when the file cannot be opened, or not be read to its end.
    """
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8") if is_gzip else open(path, encoding="utf-8") as lines:
            yield from lines
    except UNREADABLE as error:
        raise TraceError(f"{path}: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file of JSON lines; empty lines are passed over.

    Raises:
        TraceError: for a line that is no object.
    """
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path.name}:{number}: {error}") from error
        if not isinstance(value, dict):
            raise TraceError(f"{path.name}:{number}: a JSON object is wanted, not {type(value).__name__}")
        yield number, value


@contextmanager
def naming(path: Path, number: int, what: str) -> Iterator[None]:
    """Whoever makes requests of a line does it in here.

    Raises:
        TraceError: that names the line, which is not ``what``.
    """
    try:
        yield
    except UNFIT as error:
        raise TraceError(f"{path.name}:{number}: {what}: {error!r}") from error
