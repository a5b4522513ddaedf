# SPDX-License-Identifier: Apache-2.0
"""What a folder of values may hold: counted now and then, and cut by removing those that nobody has used for longest.

Everybody who writes to the folder counts it for himself, so it may hold more than its quota by what the others have
written since: each looks again after a sixty-fourth of the quota of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_AGAIN = 64
TARGET = 0.9
"""Of the quota: what is left when values had to go."""
AHEAD_S = 3600.0
"""So far another machine's clock may be ahead. A later time is of a clock that was wrong, and says nothing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a value. ``used_s``: when it was last written or read, as its time says."""

    path: str
    num_bytes: int
    used_s: float


def entries_of(folder: str) -> Iterator[Entry]:
    """All files below ``folder``; those that go away meanwhile, or whose entry is damaged, are left out.

    Raises:
        OSError: for ``folder`` itself, where it is there.
    """
    try:
        found = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in found:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from entries_of(entry.path)
            else:
                state = entry.stat(follow_symlinks=False)
                yield Entry(entry.path, state.st_size, state.st_mtime)


class FolderBound:
    """One writer's view of some folders. One thread."""

    def __init__(self, folders: Sequence[Path], *, quota_bytes: int, floor_bytes: int) -> None:
        self._folders = [str(folder) for folder in folders]
        self._quota_bytes = quota_bytes
        self._floor_bytes = floor_bytes
        self._held_bytes = self._count()
        self._unseen_bytes = 0
        self.num_evicted = 0
        self.num_pauses = 0

    def make_room(self, num_bytes: int) -> bool:
        """Remove what has to go before so many bytes are written; whether they may be."""
        if num_bytes > TARGET * self._quota_bytes:
            return False
        self._unseen_bytes += num_bytes
        if self._unseen_bytes * LOOK_AGAIN >= self._quota_bytes:
            self._held_bytes, self._unseen_bytes = self._count(), num_bytes
        if self._held_bytes + num_bytes > self._quota_bytes:
            self._cut(int(TARGET * self._quota_bytes) - num_bytes)
        has_room = self._held_bytes + num_bytes <= self._quota_bytes and all(
            self._free_bytes(folder) - num_bytes >= self._floor_bytes for folder in self._folders
        )
        self.num_pauses += not has_room
        self._held_bytes += num_bytes if has_room else 0
        return has_room

    def _count(self) -> int:
        return sum(entry.num_bytes for folder in self._folders for entry in entries_of(folder))

    def _cut(self, most_bytes: int) -> None:
        latest_s = time.time() + AHEAD_S
        entries = [entry for folder in self._folders for entry in entries_of(folder)]
        entries.sort(key=lambda entry: entry.used_s if entry.used_s <= latest_s else 0.0)
        held_bytes = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if held_bytes <= most_bytes:
                break
            try:
                os.unlink(entry.path)
                self.num_evicted += 1
            except FileNotFoundError:
                pass
            except OSError:
                # It stays, and so do its bytes: others go in its place.
                continue
            self._remove_empty(os.path.dirname(entry.path))
            held_bytes -= entry.num_bytes
        self._held_bytes, self._unseen_bytes = held_bytes, 0

    def _remove_empty(self, folder: str) -> None:
        """``folder``, and those above it, as far as nothing is left in them: each update of weights makes new ones."""
        while folder not in self._folders:
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    @staticmethod
    def _free_bytes(folder: str) -> int:
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize
