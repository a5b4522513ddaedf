# SPDX-License-Identifier: Apache-2.0
"""Which pages of a decode server are its own to keep: those behind the prompts that it was handed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

MAX_REMEMBERED_KEYS = 1 << 17
"""Some 20 MB; at 16 tokens a page two million tokens of prompts."""


class Answers:
    """Prompts handed over, the latest ``max_remembered`` pages of them. One thread."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED_KEYS) -> None:
        self._max_remembered = max_remembered
        self._handed: dict[str, None] = {}

    def handed(self, keys: Sequence[str]) -> None:
        """A request for the prompt of ``keys`` has come; another server has its pages."""
        for key in keys:
            self._handed.pop(key, None)
            self._handed[key] = None
        while len(self._handed) > self._max_remembered:
            del self._handed[next(iter(self._handed))]

    def behind(self, keys: Sequence[str]) -> list[str]:
        """``keys``, a chain of pages, from the first on that was not handed over."""
        return list(dropwhile(self._handed.__contains__, keys))
