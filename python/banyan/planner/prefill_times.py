# SPDX-License-Identifier: Apache-2.0
"""Prefill times of this rank as it runs: a cost that is fitted to its own forwards, corrected by every one that ends.

Nothing is said before enough of them were seen. Called by one thread.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from itertools import chain

from banyan.pacing.correction import Correction, length_class
from banyan.planner.prefill_cost import ForwardSample, Piece, PrefillCost

MIN_SAMPLES = 8
SAMPLES_PER_CLASS = 16
"""A server's health checks are forwards of one token: in six minutes there are more of them than a fit can use."""
MOST_BETWEEN_FITS = 1024
"""Forwards. A fit of 128 samples takes some 2 ms of the scheduler's thread: the next one comes when twice as many
forwards were seen, or the first few of a class; what has changed meanwhile is the correction's."""
FAR = 2
"""Classes. What is longer than any forward by more (by a factor of 16 at least) is not told by the fit: short forwards
take the same time whatever their length."""


class PrefillTimes:
    """Predicts prefill forwards."""

    def __init__(self, cost: PrefillCost | None = None, *, chunk_tokens: int = sys.maxsize) -> None:
        """``cost``: where it is known beforehand, as in the simulator, and is only corrected. ``chunk_tokens``: no
        forward computes more of a prompt."""
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._is_fitted = cost is None
        self._correction = Correction()
        self._samples: dict[int, deque[tuple[int, ForwardSample]]] = defaultdict(
            lambda: deque(maxlen=SAMPLES_PER_CLASS)
        )
        self.num_observed = 0
        self._fits_at = MIN_SAMPLES

    @property
    def samples(self) -> list[tuple[int, ForwardSample]]:
        """The last forwards of each class of lengths, with their numbers, oldest first."""
        return sorted(chain.from_iterable(self._samples.values()))

    def observe(self, sample: ForwardSample) -> None:
        """Learn from a forward that has ended."""
        alike = self._samples[length_class(sample.extend_tokens)]
        alike.append((self.num_observed, sample))
        self.num_observed += 1
        if self._cost is not None:
            predicted_us = self._cost.time_us(sample.pieces)
            self._correction.observe(sample.extend_tokens, predicted_us=predicted_us, measured_us=sample.forward_us)
        is_due = self.num_observed >= self._fits_at or (self._cost is not None and len(alike) == MIN_SAMPLES)
        if self._is_fitted and is_due:
            self._fits_at = self.num_observed + min(self.num_observed, MOST_BETWEEN_FITS)
            samples = [past for _, past in self.samples]
            self._cost = PrefillCost.fit(samples)
            self._correction.forget()
            for past in samples:
                self._correction.observe(
                    past.extend_tokens,
                    predicted_us=self._cost.time_us(past.pieces),
                    measured_us=past.forward_us,
                )

    def expected(self, piece: Piece) -> tuple[float, float] | None:
        """``(time_us, error_us)`` of a forward over one piece; None while nothing is known of one so long."""
        if self._cost is None:
            return None
        longest = min(piece[0], self._chunk_tokens)
        if self._is_fitted and length_class(longest) > max(self._samples) + FAR:
            return None
        ratio, deviation = self._correction.ratio(piece[0])
        time_us = self._cost.time_us((piece,))
        return time_us * ratio, time_us * deviation
