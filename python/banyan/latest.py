# SPDX-License-Identifier: Apache-2.0
"""What came last, so much of it at most.

A plain ``dict`` has its entries in this order, too, and walks past the holes of all that left it to find its oldest: of
a hundred thousand entries that takes a tenth of a millisecond for each that is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """Remembers the ``most`` entries that were put last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: V) -> None:
        """It is the latest now; what is too much is forgotten, the oldest first."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)

    def used(self, key: K, make: Callable[[], V]) -> V:
        """What is there for a key, made where nothing is. It is the latest now."""
        value = self[key] if key in self else make()
        self.put(key, value)
        return value
