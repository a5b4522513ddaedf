# SPDX-License-Identifier: Apache-2.0
"""What the system says of mounts: the tables ``/proc/mounts`` and ``/etc/fstab``, in which spaces are written as
numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/proc/mounts")

SHORT_LOCKS = ("nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock")
"""Of NFS and of Lustre: with these nobody on another machine meets a lock."""

_NUMBER = re.compile(r"\\([0-7]{3})")


def mounted(table: str) -> Iterator[tuple[str, str]]:
    """``(point, type of the file system)`` of each line of a table."""
    for point, kind, _ in _lines(table):
        yield point, kind


def holds(point: str, path: str) -> bool:
    """Whether an absolute path lies on what is mounted there, or on something mounted below."""
    return path == point or path.startswith(point.rstrip("/") + "/")


def type_of(table: str, path: str) -> str:
    """The file system that holds an absolute path without links; "unknown" where the table does not say."""
    return _nearest(table, path)[1]


def short_lock(table: str, path: str) -> str:
    """The option by which locks on an absolute path without links reach no other machine; empty where none says so."""
    options = _nearest(table, path)[2].split(",")
    return next((option for option in SHORT_LOCKS if option in options), "")


def _lines(table: str) -> Iterator[tuple[str, str, str]]:
    for line in table.splitlines():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith("#"):
            point = _NUMBER.sub(lambda found: chr(int(found[1], 8)), fields[1])
            yield point, fields[2], "".join(fields[3:4])


def _nearest(table: str, path: str) -> tuple[str, str, str]:
    best = ("", "unknown", "")
    for line in _lines(table):
        if holds(line[0], path) and len(line[0]) >= len(best[0]):
            best = line
    return best
