# SPDX-License-Identifier: Apache-2.0
"""Prompts that are lists of pages, as the shipped dispatcher compares prompts (``banyan.routing.pending_prefixes``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile

from banyan_lab.sim.caches import Page


class PagedPrefixFingerprint:
    """One prompt's pages."""

    def __init__(self, pages: Sequence[Page], page_tokens: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens

    def __len__(self) -> int:
        return len(self._pages) * self._page_tokens

    def row(self) -> PagedPrefixFingerprintRow:
        return PagedPrefixFingerprintRow()

    def most_in_common(self, row: PagedPrefixFingerprintRow) -> int:
        return max((self._num_in_common(other) for other in row), default=0) * self._page_tokens

    def oldest_in_common(self, row: PagedPrefixFingerprintRow, num_tokens: int) -> int | None:
        num_pages = num_tokens // self._page_tokens
        places = [place for place, other in enumerate(row) if self._num_in_common(other) >= num_pages]
        return places[-1] if places else None

    def _num_in_common(self, other: PagedPrefixFingerprint) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._pages, other._pages, strict=False)))


class PagedPrefixFingerprintRow:
    """Prefix fingerprints, the latest first."""

    def __init__(self) -> None:
        self._prefix_fingerprints: deque[PagedPrefixFingerprint] = deque()

    def __iter__(self) -> Iterator[PagedPrefixFingerprint]:
        return iter(self._prefix_fingerprints)

    def appendleft(self, prefix_fingerprint: PagedPrefixFingerprint) -> None:
        self._prefix_fingerprints.appendleft(prefix_fingerprint)

    def pop(self) -> int:
        return len(self._prefix_fingerprints.pop())


class PagedPrompt:
    """A prompt, as far as a cache may supply it: in whole pages."""

    def __init__(self, pages: Sequence[Page], page_tokens: int) -> None:
        self._prefix_fingerprint = PagedPrefixFingerprint(pages, page_tokens)

    def __len__(self) -> int:
        return len(self._prefix_fingerprint)

    def prefix_fingerprint(self) -> PagedPrefixFingerprint:
        return self._prefix_fingerprint
