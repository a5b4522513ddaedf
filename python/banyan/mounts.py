# SPDX-License-Identifier: Apache-2.0
"""What the system says of mounts: the tables ``/proc/mounts`` and ``/etc/fstab``, in which spaces are written as
numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/proc/mounts")

_NUMBER = re.compile(r"\\([0-7]{3})")


def mounted(table: str) -> Iterator[tuple[str, str]]:
    """``(point, type of the file system)`` of each line of a table."""
    for line in table.splitlines():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith("#"):
            yield _NUMBER.sub(lambda found: chr(int(found[1], 8)), fields[1]), fields[2]


def holds(point: str, path: str) -> bool:
    """Whether an absolute path lies on what is mounted there, or on something mounted below."""
    return path == point or path.startswith(point.rstrip("/") + "/")


def type_of(table: str, path: str) -> str:
    """The file system that holds an absolute path without links; "unknown" where the table does not say."""
    best, kind = "", "unknown"
    for point, named in mounted(table):
        if holds(point, path) and len(point) >= len(best):
            best, kind = point, named
    return kind
