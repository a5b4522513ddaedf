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

    def expected(self, piece: Piece) -> tuple[float, float, float] | None:
        """``(time_us, error_us, first_us)`` of computing one piece, in as many forwards as it has chunks, the first of
        which takes ``first_us``; None while nothing is known of one so long."""
        if self._cost is None:
            return None
        num_tokens, prefix = piece
        chunk = min(num_tokens, self._chunk_tokens)
        if self._is_fitted and length_class(chunk) > max(self._samples) + FAR:
            return None
        num_more, rest = divmod(num_tokens - chunk, chunk or 1)
        first_us, error_us = self._forward(chunk, prefix)
        time_us = first_us
        if num_more:
            # What one takes grows evenly with what lies before it.
            ends = self._forward(chunk, prefix + chunk), self._forward(chunk, prefix + num_more * chunk)
            mean_us, mean_error_us = (sum(both) / 2 for both in zip(*ends, strict=True))
            time_us, error_us = time_us + num_more * mean_us, error_us + num_more * mean_error_us
        if rest:
            last_us, last_error_us = self._forward(rest, prefix + num_tokens - rest)
            time_us, error_us = time_us + last_us, error_us + last_error_us
        return time_us, error_us, first_us

    def _forward(self, num_tokens: int, prefix: int) -> tuple[float, float]:
        """``(time_us, error_us)`` of one forward."""
        assert self._cost is not None
        ratio, deviation = self._correction.ratio(num_tokens)
        time_us = self._cost.time_us(((num_tokens, prefix),))
        return time_us * ratio, time_us * deviation
