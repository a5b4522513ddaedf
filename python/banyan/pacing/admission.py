# SPDX-License-Identifier: Apache-2.0
"""Is a page worth a write? Most prefixes are seen once; writing them costs bandwidth and endurance and buys nothing.

A page is written at its second access (``second_access``), or always (``first_access``: archives, tests), and only
while the drive's budget lasts. Accesses are remembered for a bounded number of keys, the least recently seen forgotten
first.
"""

from __future__ import annotations

from enum import Enum

from banyan.core import PageKey
from banyan.latest import Latest
from banyan.pacing.allowance import Allowance

MAX_REMEMBERED_KEYS = 1 << 18
"""Some 40 MB at 150 bytes a key; at 16 tokens a page the last four million tokens."""


class WriteVerdict(Enum):
    """What became of an offered page. Everything but ``QUEUED`` means: not stored, and counted."""

    QUEUED = "queued"
    SEEN_ONCE = "seen_once"
    OVER_BUDGET = "over_budget"


class Admission(Enum):
    """From which access on a page is worth a write."""

    FIRST_ACCESS = 1
    SECOND_ACCESS = 2


class WriteAdmission:
    """Decides page by page. Called by one thread."""

    def __init__(self, admission: Admission, *, budget: Allowance | None) -> None:
        """``budget`` None: the device does not wear (memory, a remote store that counts for itself)."""
        self._admission = admission
        self._budget = budget
        self._seen_once: Latest[PageKey, None] = Latest(MAX_REMEMBERED_KEYS)

    def judge(self, key: PageKey, num_bytes: int, now_ns: int) -> WriteVerdict:
        """``QUEUED``: write it, its bytes are taken from the budget. A page refused for its budget keeps its access."""
        if self._admission is Admission.SECOND_ACCESS and key not in self._seen_once:
            self._remember(key)
            return WriteVerdict.SEEN_ONCE
        if self._budget is not None and not self._budget.take(num_bytes, now_ns / 1e9):
            self._remember(key)
            return WriteVerdict.OVER_BUDGET
        self._seen_once.pop(key, None)
        return WriteVerdict.QUEUED

    def give_back(self, key: PageKey, num_bytes: int) -> None:
        """A page that was admitted is not written after all: it has its bytes and its access again."""
        self.unspend(num_bytes)
        self._remember(key)

    def unspend(self, num_bytes: int) -> None:
        """A page that was admitted was stored already."""
        if self._budget is not None:
            self._budget.give_back(num_bytes)

    def _remember(self, key: PageKey) -> None:
        if self._admission is not Admission.FIRST_ACCESS:
            self._seen_once.put(key, None)
