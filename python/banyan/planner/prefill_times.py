# SPDX-License-Identifier: Apache-2.0
"""Prefill times of this rank as it runs: a cost that is fitted to its own forwards, corrected by every one that ends.

Nothing is said before enough of them were seen. Called by one thread.
"""

from __future__ import annotations

from collections import deque

from banyan.pacing import Correction
from banyan.planner.prefill_cost import ForwardSample, Piece, PrefillCost

MIN_SAMPLES = 8
MAX_SAMPLES = 128
REFIT_EVERY = 32
"""A fit of 128 samples takes some 2 ms."""


class PrefillTimes:
    """Predicts prefill forwards."""

    def __init__(self, cost: PrefillCost | None = None) -> None:
        """``cost``: where it is known beforehand, as in the simulator, and is only corrected."""
        self._cost = cost
        self._is_fitted = cost is None
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
        if self._is_fitted and self._is_due():
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
