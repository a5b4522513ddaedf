# SPDX-License-Identifier: Apache-2.0
"""Threads for calls of a library that may hang: who closes does not wait for it, nor does Python in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from banyan.telemetry.threads import notice, start_thread


class Workers:
    """``num_threads`` of them at most, each from the first work on that needs it. ``feature``: what they do, for the
    log. Any thread submits; one closes."""

    def __init__(self, num_threads: int, *, name: str, feature: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._feature = feature
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], None]) -> None:
        """Have it done. A fault of it is said, and the next is done all the same.

        Raises:
            RuntimeError: when there is no thread to be had; it is not done then.
        """
        if len(self._threads) < self._num_threads:
            try:
                self._threads.append(start_thread(self._run, name=self._name, feature=self._feature))
            except RuntimeError:
                if not self._threads:
                    raise
        self._work.put(work)

    def close(self, within_s: float) -> None:
        """What has not begun does not begin; wait so long for the rest."""
        try:
            while True:
                self._work.get_nowait()
        except Empty:
            pass
        for _ in self._threads:
            self._work.put(None)
        deadline_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a panic of native code is one
                notice(error, name=self._name, feature=self._feature)
