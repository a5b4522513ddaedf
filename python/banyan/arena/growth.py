# SPDX-License-Identifier: Apache-2.0
"""Memory for the arena as it is needed, ahead of need and never the machine's last.

Invariants
  1. Frames below ``num_backed`` have memory; only these are handed out.
  2. Memory is taken in steps on a thread of its own, one at a time; the caller never waits for one.
  3. No step is taken that would leave the machine less than its reserve.

States: idle -> taking (few frames are unused) -> idle with more frames, or resting (no room) -> idle; or full.
``poll`` and ``close`` come from the scheduler thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future

logger = logging.getLogger("banyan")

STEP_BYTES = 64 << 20
"""Taken at once: some 3,000 tokens of a small model, and 16,384 page faults of 4 KiB at worst."""

REST_NS, MOST_REST_NS = 2_000_000_000, 64_000_000_000
"""Until the machine is asked again after it had no room: at first, and when it has had none again and again."""


class Growth:
    """Backs the frames of one part, from the first on.

    Args:
        num_frames: all that there can be.
        num_backed: those that have memory already.
        ahead_frames: more are asked for while fewer than these are unused.
        step_frames: frames of one step.
        back: gives frames ``[start, stop)`` memory. Raises what it likes. Called on the executor's thread.
        has_room: whether the machine can spare the bytes of that many frames. Called on the executor's thread.
        clock: nanoseconds.
        is_resting: whether no step is to be taken just now, for the sake of others.
    """

    def __init__(
        self,
        *,
        num_frames: int,
        step_frames: int,
        back: Callable[[int, int], None],
        has_room: Callable[[int], bool],
        executor: Executor,
        clock: Callable[[], int],
        ahead_frames: int,
        num_backed: int = 0,
        is_resting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._num_frames = num_frames
        self._step_frames = step_frames
        self._ahead_frames = ahead_frames
        self._back = back
        self._has_room = has_room
        self._executor = executor
        self._clock = clock
        self._is_resting = is_resting
        self._taking: Future[int] | None = None
        self._rests_until_ns = clock()
        self._said = False
        self._rest_ns = REST_NS
        self.num_backed = num_backed

    def poll(self, num_unused: int) -> int:
        """How many frames have come since the last call; asks for more while too few are unused."""
        num_new = self._collect()
        wanted = num_unused + num_new < self._ahead_frames and self.num_backed < self._num_frames
        may_take = self._taking is None and self._clock() >= self._rests_until_ns
        if wanted and may_take and not self._is_resting():
            start = self.num_backed
            stop = min(start + self._step_frames, self._num_frames)
            self._taking = self._executor.submit(self._take, start, stop)
        return num_new

    def close(self) -> None:
        """Wait for the step that is under way. Nothing is taken afterwards."""
        if self._taking is not None:
            self._taking.exception()
            self._taking = None
        self._executor.shutdown()
        self._num_frames = self.num_backed

    def _take(self, start: int, stop: int) -> int:
        if not self._has_room(stop - start):
            return 0
        self._back(start, stop)
        return stop - start

    def _collect(self) -> int:
        if self._taking is None or not self._taking.done():
            return 0
        taken, self._taking = self._taking, None
        error = taken.exception()
        num_new = 0 if error is not None else taken.result()
        if num_new == 0:
            self._rest(error)
        else:
            self._rest_ns = REST_NS
        self.num_backed += num_new
        return num_new

    def _rest(self, error: BaseException | None) -> None:
        self._rests_until_ns = self._clock() + self._rest_ns
        self._rest_ns = min(2 * self._rest_ns, MOST_REST_NS)
        if not self._said:
            reason = "the machine's free memory is for others" if error is None else str(error)
            logger.warning("banyan: host arena stays at %d frames for now: %s", self.num_backed, reason)
            self._said = True
