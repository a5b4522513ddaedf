# SPDX-License-Identifier: Apache-2.0
"""How fast KV comes from each supplier: measured per token, for each class of lengths, with its usual error.

Short moves pay a start-up cost for each token that long ones do not, so lengths within a factor of four share an
estimate and no others. A node that is slow makes no other one slow. Called by one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from banyan.core import SourceKind, Supplier
from banyan.latest import Latest
from banyan.pacing.correction import length_class, nearest, shortest_of_class
from banyan.telemetry import Estimate

FEW = 3
"""An estimate of fewer moves is taken to be off by as much as it is."""


MOST_SUPPLIERS = 1024
"""Nodes come and go, with other addresses."""

MOST_TIMES = 8.0
"""One move (a suspended process) may count for no more than this many times what was expected, a trial as well."""


class MoveRates:
    """Microseconds for each token moved."""

    def __init__(self) -> None:
        self._per_token_us = Latest[Supplier, dict[int, Estimate]](MOST_SUPPLIERS)

    def observe(self, supplier: Supplier, num_tokens: int, move_us: float) -> None:
        """``num_tokens`` came from ``supplier`` in ``move_us``. Moves of nothing say nothing."""
        if num_tokens > 0 and move_us > 0:
            classes = self._per_token_us.used(supplier, dict)
            estimate = classes.setdefault(length_class(num_tokens), Estimate())
            most_us = MOST_TIMES * estimate.mean or inf
            estimate.observe(min(move_us / num_tokens, most_us))

    def observe_at_most(self, supplier: Supplier, num_tokens: int, move_us: float) -> None:
        """A move of ``num_tokens`` would have taken no longer: one that is expected to has become faster."""
        expected = self.expected(supplier, num_tokens)
        if expected is not None and move_us < expected[0]:
            self.observe(supplier, num_tokens, move_us)

    def measure_anew(self, supplier: Supplier, num_tokens: int) -> None:
        """What the next move of such a length takes counts as if it were the first."""
        estimate = self._per_token_us.get(supplier, {}).get(length_class(num_tokens))
        if estimate is not None:
            estimate.count = 0

    def observe_batch(self, tokens: Mapping[Supplier, int], move_us: float) -> None:
        """Tokens of several suppliers came together in ``move_us``: each is given its expected share of that time.

        While one was never measured, the shares are those of the tokens. What they take together is learnt from any
        batches, what each of them takes from those of one among them: from the others alone it cannot be known.
        """
        moved = {one: count for one, count in tokens.items() if count > 0 and one is not SourceKind.OWN}
        expected = {one: self.expected(one, count) for one, count in moved.items()}
        weights = {
            one: float(count) if None in expected.values() else (expected[one] or (0.0, 0.0))[0]
            for one, count in moved.items()
        }
        total = sum(weights.values())
        for one, count in moved.items():
            self.observe(one, count, move_us * weights[one] / total)

    def expected(self, supplier: Supplier, num_tokens: int) -> tuple[float, float] | None:
        """``(move_us, error_us)`` of a move; nothing for own pages, None while the supplier was never measured."""
        if supplier is SourceKind.OWN or num_tokens == 0:
            return 0.0, 0.0
        classes = self._per_token_us.get(supplier)
        if not classes:
            return None
        estimate = classes[nearest(length_class(num_tokens), classes)]
        error_us = estimate.mean if estimate.count < FEW else estimate.deviation
        return estimate.mean * num_tokens, error_us * num_tokens

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Mean microseconds a token, by supplier and smallest length of the class."""
        return {
            supplier.value if isinstance(supplier, SourceKind) else supplier: {
                str(shortest_of_class(number)): estimate.mean for number, estimate in sorted(classes.items())
            }
            for supplier, classes in self._per_token_us.items()
        }
