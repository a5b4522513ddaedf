# SPDX-License-Identifier: Apache-2.0
"""Values that are removed while somebody waits for it, who does not wait for a library that hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from banyan.features.stores.values import Values
from banyan.telemetry import start_thread

AT_ONCE = 1024
"""Removed by one call of a library."""


class Evictions:
    """One at a time, each on a thread of its own. ``within_s``: so long it is waited for."""

    def __init__(self, values: Values, within_s: float) -> None:
        self._values = values
        self._within_s = within_s
        self._thread: threading.Thread | None = None

    def remove(self, names: Sequence[str]) -> int:
        """Remove those that are there; how many. Blocks.

        Raises:
            OSError: when the library refuses, or has not answered in time: it may go on by itself. While it does
                nothing else is removed.
        """
        if self._thread is not None and self._thread.is_alive():
            raise TimeoutError("the store has not removed yet what it was told to remove before")
        removed: Future[int] = Future()
        try:
            self._thread = start_thread(
                lambda: self._carry_out(names, removed), name="banyan-store-remove", feature="removing from the store"
            )
        except RuntimeError as error:
            raise OSError(f"no thread to remove {len(names)} page(s): {error}") from error
        try:
            return removed.result(self._within_s)
        except TimeoutError as error:
            raise TimeoutError(f"the store has not removed {len(names)} page(s) within {self._within_s:g} s") from error

    def _carry_out(self, names: Sequence[str], removed: Future[int]) -> None:
        try:
            pieces = (names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE))
            removed.set_result(sum(map(self._values.remove, pieces)))
        except OSError as error:
            removed.set_exception(error)
        except Exception as error:  # noqa: BLE001 - whatever a library raises costs hits, and nothing else
            removed.set_exception(OSError(str(error)))
