# SPDX-License-Identifier: Apache-2.0
"""Which page comes before which. SGLang names the pages of a tree node, not the page that the node hangs on.

The store needs to know: a page without its parent is never found. Learnt from whole prompts; a bounded number of keys
is remembered, the least recently learnt forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence

from banyan.latest import Latest

MAX_REMEMBERED_KEYS = 1 << 17
"""Some 30 MB; at 16 tokens a page two million tokens of prompts."""

ROOT = ""
"""The parent of the first page of a prompt. No page key is empty."""


class Lineage:
    """Parents of pages. One thread."""

    def __init__(self) -> None:
        self._parent_of: Latest[str, str] = Latest(MAX_REMEMBERED_KEYS)

    def learn(self, keys: Sequence[str]) -> None:
        """``keys`` follow each other, from the first page of a prompt."""
        parent = ROOT
        for key in keys:
            self._parent_of.put(key, parent)
            parent = key

    def parent(self, key: str) -> str | None:
        """The page before, ``ROOT``, or None when it is not known."""
        return self._parent_of.get(key)
