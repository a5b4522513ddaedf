# SPDX-License-Identifier: Apache-2.0
"""What the store may write, told from one forward pass to the next.

The store starts its writes itself, reads first and two at a time; what it cannot know is the forward:

  prefill that waits for KV from the store   nothing is written: the device belongs to its reads
  another prefill                            what can be written while it is predicted to run, so that the device is
                                             free when the next batch wants to read; nothing without a profile
  decode steps, or none                      whatever the back-log holds: nobody is about to read

States: open -> ``begin_prefill`` -> paused or limited -> ``end`` -> open. Called by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from banyan.pacing.corrected_table import LayerTimes
from banyan.pacing.slack_table import ForwardShape


class PermittedStore(Protocol):
    """The three things that a store is told. Each holds until the next."""

    def pause_writes(self) -> None: ...

    def set_write_budget(self, num_bytes: int) -> None: ...

    def open_writes(self) -> None: ...


class CountingStore(PermittedStore, Protocol):
    """A store that says what it has written."""

    def stats(self) -> dict[str, int]:
        """``written_bytes`` that are durable, and ``writing_us``: microseconds in which something was being written."""


class WritePermits:
    """Tells one store."""

    def __init__(
        self,
        store: PermittedStore,
        *,
        times: LayerTimes | None,
        num_layers: int,
        block_bytes: int,
        write_bytes_per_us: Callable[[], float],
    ) -> None:
        """``times`` None: nothing was profiled. ``block_bytes``: the smallest write; less than that is a pause.
        ``write_bytes_per_us``: what the drive takes, as far as is known; asked before each prefill."""
        if block_bytes < 1 or num_layers < 1:
            raise ValueError(f"block {block_bytes}, layers {num_layers}: above 0")
        self._store = store
        self._times = times
        self._num_layers = num_layers
        self._block_bytes = block_bytes
        self._write_bytes_per_us = write_bytes_per_us
        self._is_open = True

    def begin_prefill(self, shape: ForwardShape, *, num_stored_tokens: int) -> None:
        """A prefill of ``shape`` starts; so many of its prefix tokens are on their way from the store."""
        self._is_open = False
        num_bytes = 0 if num_stored_tokens else self._bytes_during(shape)
        if num_bytes < self._block_bytes:
            self._store.pause_writes()
        else:
            self._store.set_write_budget(num_bytes)

    def _bytes_during(self, shape: ForwardShape) -> int:
        if self._times is None:
            return 0
        return int(self._times.safe_us(shape) * self._num_layers * self._write_bytes_per_us())

    def end(self) -> None:
        """The prefill has ended. Also called after decode steps, which changes nothing."""
        if not self._is_open:
            self._is_open = True
            self._store.open_writes()
