# SPDX-License-Identifier: Apache-2.0
"""Threads of Banyan's: each is started here, so that none ends unnoticed.

Invariants
  1. A thread that ends by a fault is named in the log with what it did, and counted. What it did ends with it:
     ``ended`` lets go of whoever waits for it. ``banyan.faults`` says so, and how often, by its name.
  2. A fault is whatever the thread raises, panics of native code included.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from banyan import faults

logger = logging.getLogger("banyan")

_lock = threading.Lock()
_num_ended = 0


def num_ended() -> int:
    """Threads, and pieces of work of executors, that have ended by a fault since this process has started."""
    return _num_ended


def start_thread(
    work: Callable[[], None], *, name: str, feature: str, ended: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Start a daemon. ``feature``: what it does, for the log. ``ended`` is called on it when it has ended by a fault.

    Raises:
        RuntimeError: when the system has no thread left.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a panic of native code is one
            notice(error, name=name, feature=feature, ended=ended)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def one_thread(name: str) -> ThreadPoolExecutor:
    """An executor whose only thread is there from the start: later there may be none to be had, and what was submitted
    then would be done all the same, with the next.

    Raises:
        RuntimeError: when the system has no thread left.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    executor.submit(int)
    return executor


def notice(error: BaseException, *, name: str, feature: str, ended: Callable[[], None] = lambda: None) -> None:
    """Something that was to go on has ended by ``error``."""
    global _num_ended
    with _lock:
        _num_ended += 1
    try:
        faults.note(f"the thread {name}", error, consequence=f"{feature} has ended with it")
    finally:
        _tell_end(name, ended)


def _tell_end(name: str, ended: Callable[[], None]) -> None:
    try:
        ended()
    except Exception:
        logger.exception("banyan: the end of the thread %s could not be told to who waits for it", name)
