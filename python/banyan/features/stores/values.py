# SPDX-License-Identifier: Apache-2.0
"""What a library has to be able to do to keep pages for a server: values by name, read in transfers.

Every call may block, and is made on threads that only do this: never the scheduler's. Memory is given by its address;
it was registered before. What is read is believed by its checksums alone, so a backend promises nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Iovec(NamedTuple):
    """Bytes in memory."""

    address: int
    num_bytes: int


class Value(NamedTuple):
    """A value to be written: its name, and its parts one behind the other."""

    name: str
    parts: Sequence[Iovec]


class Transfer(NamedTuple):
    """Bytes ``start`` and following of the value with that number go to ranges of memory, one after the other."""

    number: int
    start: int
    to: Sequence[Iovec]

    @property
    def num_bytes(self) -> int:
        return sum(iovec.num_bytes for iovec in self.to)


class Reading(Protocol):
    """Some values that are being read."""

    def load(self, transfers: Sequence[Transfer]) -> list[bool]:
        """Bring transfers into memory; which of them came whole.

        Raises:
            OSError: when the store does not answer.
        """


class Values(Protocol):
    """A store of values. All methods raise ``OSError`` when it does not answer as a whole."""

    @property
    def engine(self) -> str:
        """In one line, what does the work."""

    @property
    def least_bytes(self) -> int:
        """A transfer of less takes about as long: steps of a read are made of so many layers that none is smaller."""

    def register(self, iovec: Iovec) -> None:
        """Announce memory that values will move in and out of."""

    def present(self, names: Sequence[str]) -> list[bool]: ...

    def write(self, values: Sequence[Value]) -> list[bool]:
        """Which of them were written. Others find a value whole, or not at all."""

    def reading(self, names: Sequence[str]) -> AbstractContextManager[Reading]:
        """Values to read from; those that are not there give nothing."""

    def remove(self, names: Sequence[str]) -> int:
        """Remove those that are there; how many."""

    def stats(self) -> dict[str, int]:
        """What it counts beside reads and writes."""

    def close(self) -> None: ...
