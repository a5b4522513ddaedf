# SPDX-License-Identifier: Apache-2.0
"""The lock on the loads of all ranks: whoever is stopped while it holds it stops nobody else.

SGLang has one lock for the whole file. Ranks write under it, an idle one in every pass; dispatcher and main process
read under it, and all wait for ever. But a rank's place has one writer, which empties it first. Read without the lock
it is empty, or what is read does not decode, or it has for once numbers of two reports.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from banyan.sglang_plugin import runtime

PATIENCE_S = 0.001
"""It is held for microseconds, less than a sleep takes. While somebody is stopped with it, every report and every look
takes so long."""


def around_file_lock(
    original: Callable[[int, int], AbstractContextManager[None]], fd: int, lock_type: int
) -> AbstractContextManager[None]:
    return original(fd, lock_type) if runtime.config() is None else _locked_soon(fd, lock_type)


@contextlib.contextmanager
def _locked_soon(fd: int, lock_type: int) -> Iterator[None]:
    """With the lock, or without it where it is not to be had."""
    until_s = time.monotonic() + PATIENCE_S
    while not _is_locked(fd, lock_type) and time.monotonic() < until_s:
        time.sleep(0)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _is_locked(fd: int, lock_type: int) -> bool:
    try:
        fcntl.flock(fd, lock_type | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
