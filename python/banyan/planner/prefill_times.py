# SPDX-License-Identifier: Apache-2.0
"""Prefill times of this rank as it runs: a fitted cost, corrected by every forward that ends.

With a profile the fit is the profile's. Without one the rank fits its own forwards, and says nothing before it has seen
enough of them. Called by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from banyan.pacing import Correction
from banyan.planner.prefill_cost import ForwardSample, Piece, PrefillCost

MIN_SAMPLES = 8
MAX_SAMPLES = 128
REFIT_EVERY = 32
"""A fit of 128 samples takes some 2 ms."""


class PrefillTimes:
    """Predicts prefill forwards."""

    def __init__(self, profiled: PrefillCost | None = None) -> None:
        self._cost = profiled
        self._is_profiled = profiled is not None
        self._correction = Correction()
        self._samples: deque[ForwardSample] = deque(maxlen=MAX_SAMPLES)
        self.num_observed = 0

    @property
    def samples(self) -> tuple[ForwardSample, ...]:
        """The last forwards, oldest first; the newest is number ``num_observed``."""
        return tuple(self._samples)

    def observe(self, sample: ForwardSample) -> None:
        """Learn from a forward that has ended."""
        self._samples.append(sample)
        self.num_observed += 1
        if self._cost is not None:
            predicted_us = self._cost.time_us(sample.pieces)
            self._correction.observe(sample.extend_tokens, predicted_us=predicted_us, measured_us=sample.forward_us)
        if not self._is_profiled and self._is_due():
            self._cost = PrefillCost.fit(self._samples)
            self._correction.forget()
            for past in self._samples:
                self._correction.observe(
                    past.extend_tokens,
                    predicted_us=self._cost.time_us(past.pieces),
                    measured_us=past.forward_us,
                )

    def _is_due(self) -> bool:
        if self._cost is None:
            return self.num_observed >= MIN_SAMPLES
        return self.num_observed % REFIT_EVERY == 0

    def expected(self, piece: Piece) -> tuple[float, float] | None:
        """``(time_us, error_us)`` of a forward over one piece; None while nothing is known."""
        if self._cost is None:
            return None
        ratio, deviation = self._correction.ratio(piece[0])
        time_us = self._cost.time_us((piece,))
        return time_us * ratio, time_us * deviation

    def largest_extend(self, prefix_tokens: int, *, quota_us: float, taken: Sequence[Piece], at_most: int) -> int:
        """The most new tokens behind ``prefix_tokens`` that fit into a forward of ``quota_us`` beside ``taken``.

        ``at_most`` while nothing is known.
        """
        if self._cost is None:
            return at_most
        num_taken = sum(extend for extend, _ in taken)
        used_us = self._cost.time_us(taken) if taken else self._cost.fixed_us
        extend = at_most
        # Lengths differ in their correction, and the length is the answer: two rounds settle it to its class.
        for _ in range(2):
            allowance_us = self._correction.allowance_us(num_taken + extend, quota_us)
            extend = self._cost.largest_extend(prefix_tokens, allowance_us - used_us, at_most=at_most)
        return extend
