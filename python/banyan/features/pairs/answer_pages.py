# SPDX-License-Identifier: Apache-2.0
"""Which pages of a decode server are its own to write: those behind the prompts that it was handed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

from banyan.latest import Latest

MAX_REMEMBERED_KEYS = 1 << 17
"""Some 20 MB; at 16 tokens a page two million tokens of prompts."""


class Answers:
    """Prompts handed over, and pages generated, the latest ``max_remembered`` of each. One thread.

    A page that was generated stays so when it comes again as a part of the next prompt.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED_KEYS) -> None:
        self._handed: Latest[str, None] = Latest(max_remembered)
        self._generated: Latest[str, None] = Latest(max_remembered)

    def handed(self, keys: Sequence[str]) -> None:
        """A request for the prompt of ``keys`` has come; another server has its pages."""
        for key in keys:
            self._handed.put(key, None)

    def clear(self) -> None:
        """The caches have been emptied, or the weights are others: what was handed over may now be generated here."""
        self._handed.clear()
        self._generated.clear()

    def behind(self, keys: Sequence[str]) -> list[str]:
        """``keys``, a chain of pages, from the first on that was not handed over."""
        return list(dropwhile(self._handed.__contains__, keys))

    def generated(self, keys: Sequence[str]) -> None:
        """These pages are on their way to the arena, and to be written once they are there."""
        for key in keys:
            self._generated.put(key, None)

    def take_generated(self, keys: Sequence[str]) -> list[str]:
        """A chain of pages that has come to the arena, from the first on that was generated here; asked once."""
        taken = list(dropwhile(lambda key: key not in self._generated, keys))
        for key in taken:
            self._generated.pop(key, None)
        return taken
