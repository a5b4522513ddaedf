# SPDX-License-Identifier: Apache-2.0
"""Values in this process, and what can go wrong with values anywhere: for tests and for trying things out."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFaults:
    """Each number is "one in so many operations"; 0 is never. The same seed gives the same faults."""

    seed: int = 0
    eio: int = 0
    flip: int = 0
    lose: int = 0


class MemoryValues:
    """A dictionary that forgets, flips bits and fails as it is told."""

    def __init__(self, faults: MemoryFaults | None = None) -> None:
        self._faults = faults or MemoryFaults()
        self._dice = random.Random(self._faults.seed)
        self._values: dict[str, bytes] = {}

    def _strikes(self, chance: int) -> bool:
        return chance > 0 and self._dice.randrange(chance) == 0

    def _may_fail(self) -> None:
        if self._strikes(self._faults.eio):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def put(self, name: str, value: Sequence[memoryview]) -> None:
        self._may_fail()
        stored = bytearray(b"".join(value))
        if self._strikes(self._faults.flip):
            stored[self._dice.randrange(len(stored))] ^= 1 << self._dice.randrange(8)
        self._values[name] = bytes(stored)

    def get(self, name: str, num_bytes: int) -> bytes | None:
        self._may_fail()
        if self._strikes(self._faults.lose):
            self._values.pop(name, None)
        return self._values.get(name)

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._values for name in names]

    def remove(self, name: str) -> None:
        self._values.pop(name, None)

    def close(self) -> None:
        self._values.clear()
