# SPDX-License-Identifier: Apache-2.0
"""Prompts that were placed at one rank and that it has not computed yet: it will hold them when it comes to the next.

A directory knows a page once it is published. Of two requests with one prefix that come shortly after each other, the
second would be placed as if nobody were about to have it.

Invariants
  1. A prompt is pending from its placement until the rank has computed more tokens than were before it and its own, and
     one batch more, or has said that it has nothing to do, or that it computes no prompts. By then its pages are
     published, or never will be: aborted, or already evicted.
  2. The latest prompts are kept, of at most ``MAX_PENDING_TOKENS`` in all.

What is pending is advice for placing. It never says that pages can be read, or copied.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

MAX_PENDING_TOKENS = 1 << 22
"""2 MB for each rank at 16 tokens a page."""


class PrefixFingerprintRow(Protocol):
    """``banyan._native.PrefixFingerprintRow``: prefix fingerprints in a row, the latest first."""

    def appendleft(self, prefix_fingerprint: Any) -> None: ...

    def pop(self) -> int:
        """Drop the oldest; its length in tokens."""


class PrefixFingerprint(Protocol):
    """``banyan._native.PrefixFingerprint``: what stays of a prompt to compare others with."""

    def __len__(self) -> int:
        """In tokens."""

    def row(self) -> PrefixFingerprintRow:
        """A new one, empty, for prefix fingerprints like this one."""

    def most_in_common(self, row: Any) -> int:
        """The most leading tokens, in whole pages, that it has in common with one of ``row``."""

    def oldest_in_common(self, row: Any, num_tokens: int) -> int | None:
        """The place, the latest being 0, of the oldest of ``row`` that begins with the same ``num_tokens``."""


class PromptTokens(Protocol):
    """``banyan._native.PromptTokens``: a prompt, as far as a cache may supply it."""

    def __len__(self) -> int: ...

    def prefix_fingerprint(self) -> PrefixFingerprint: ...


class PendingPrefixes:
    """Those of one rank, the latest first. ``due_tokens`` count what the rank computes in its life."""

    __slots__ = ("_due_tokens", "_num_tokens", "_row")

    def __init__(self) -> None:
        # The prefix fingerprints stay in the native core, where all are compared in one call: a dispatcher has some
        # microseconds.
        self._row: PrefixFingerprintRow | None = None
        self._due_tokens: deque[int] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._due_tokens)

    def placed(self, prefix_fingerprint: PrefixFingerprint, due_tokens: int) -> None:
        """The rank will have computed the prompt when it has computed ``due_tokens``."""
        if self._row is None:
            self._row = prefix_fingerprint.row()
        try:
            self._row.appendleft(prefix_fingerprint)
        except ValueError:
            # Of pages of another size, which another server has brought or taken away: they compare with none of these.
            self.clear()
            self._row = prefix_fingerprint.row()
            self._row.appendleft(prefix_fingerprint)
        self._due_tokens.appendleft(due_tokens)
        self._num_tokens += len(prefix_fingerprint)
        while self._num_tokens > MAX_PENDING_TOKENS:
            self._forget_oldest()

    def computed(self, total_tokens: int) -> None:
        """The rank has computed so much in its life."""
        while self._due_tokens and self._due_tokens[-1] < total_tokens:
            self._forget_oldest()

    def clear(self) -> None:
        """The rank has nothing to do."""
        self._row = None
        self._due_tokens.clear()
        self._num_tokens = 0

    def leading_tokens(self, prefix_fingerprint: PrefixFingerprint) -> int:
        """Leading tokens of a prompt that the rank is about to have."""
        # The latest first: of a conversation's turns that is the longest, and the others are passed over then.
        return 0 if self._row is None else prefix_fingerprint.most_in_common(self._row)

    def due_tokens(self, prefix_fingerprint: PrefixFingerprint, num_tokens: int) -> int:
        """What the rank will have computed when it first has so many leading tokens of a prompt.

        Raises:
            LookupError: when it is not about to have them.
        """
        place = None if self._row is None else prefix_fingerprint.oldest_in_common(self._row, num_tokens)
        if place is None:
            raise LookupError(f"nobody waits for {num_tokens} tokens of this prompt")
        return self._due_tokens[place]

    def _forget_oldest(self) -> None:
        assert self._row is not None
        self._due_tokens.pop()
        self._num_tokens -= self._row.pop()
