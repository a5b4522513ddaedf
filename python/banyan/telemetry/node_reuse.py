# SPDX-License-Identifier: Apache-2.0
"""How much of what is asked of a node could be found: if nothing were lost, and with less or more memory.

Each rank counts for the node: its own prompts, and those that the other ranks tell of. A rank is told of a prompt
twice, when it has come and when its answer begins; only then is known what had to be computed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import msgspec

from banyan import _native
from banyan.telemetry.gauges import WINDOW_MINUTES

COUNT_PERIOD_S = 5.0
"""Between two counts: one takes 0.2 ms."""

REACH = 8
"""What returns after as many pages as this many times the node's memory counts as never asked for."""

PAGE_BYTES = 8
_NO_PAGE = 1
"""What a message begins with that tells of an answer, where others have their first page's number."""

_HEAD = struct.Struct("<QQQ")

MOST_COMPUTED_BYTES = (1 << 12) * PAGE_BYTES - _HEAD.size
"""An access log takes half of its ring of a message (banyan-shm/src/access_log.rs)."""


class PromptAnswer(msgspec.Struct, frozen=True):
    """A prompt whose answer has begun.

    Attributes:
        num_pages: of the prompt, those that a cache may supply.
        computed: the numbers of those that were not found, as ``page_numbers`` gives them.
    """

    num_tokens: int
    num_pages: int
    computed: bytes

    def message(self) -> bytes:
        """As words whose lowest bit says nothing: that of an access log's words is not kept. Where more was computed
        than a message holds, that of a shorter prompt of which the same share was."""
        most = MOST_COMPUTED_BYTES
        num_tokens, num_pages = (
            number * most // max(len(self.computed), most) for number in (self.num_tokens, self.num_pages)
        )
        return _HEAD.pack(_NO_PAGE, num_tokens << 1, num_pages << 1) + self.computed[:most]

    @classmethod
    def of(cls, message: bytes) -> PromptAnswer | None:
        """None for one that tells of a prompt that has come."""
        if len(message) < _HEAD.size:
            return None
        first, num_tokens, num_pages = _HEAD.unpack_from(message)
        return cls(num_tokens >> 1, num_pages >> 1, message[_HEAD.size :]) if first == _NO_PAGE else None


class NodeReuse:
    """One rank's. One thread.

    Args:
        node_pages: that the memory of the node's ranks has room for.
        seed: 64 bits that no client knows.
        clock: seconds; it does not fall.
    """

    def __init__(self, page_tokens: int, node_pages: int, seed: int, clock: Callable[[], float]) -> None:
        self._make = partial(_native.Reuse, page_tokens, REACH * node_pages, seed)
        self._clock = clock
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing that was asked for before can be found any more."""
        self._reuse = self._make()
        self._figures: dict[str, float] = {}
        self._counts_again_s = 0.0

    def asked(self, pages: bytes) -> None:
        """A prompt of these pages has come, here or at a peer."""
        self._reuse.asked(pages, int(self._clock()))

    def came(self, pages: bytes) -> None:
        """This rank's tree has these pages of one chain: answers may be found, too."""
        self._reuse.came(pages)

    def answered(self, one: PromptAnswer) -> None:
        """An answer begins, here or at a peer."""
        self._reuse.answered(one.num_tokens, one.num_pages, one.computed, int(self._clock()))

    def figures(self, node_pages: Callable[[float], float]) -> dict[str, float]:
        """As ``count``, but counted anew every ``COUNT_PERIOD_S`` only."""
        return self._figures if self._clock() < self._counts_again_s else self.count(node_pages)

    def count(self, node_pages: Callable[[float], float]) -> dict[str, float]:
        """As gauges have them. ``node_pages``: distinct pages that the node would hold with so many times its arena."""
        now_s = self._clock()
        self._counts_again_s = now_s + COUNT_PERIOD_S
        found = self._reuse.found_within
        heard = {
            f"heard_tokens_{name}": self._reuse.num_tokens(num_minutes, int(now_s))
            for name, num_minutes in WINDOW_MINUTES.items()
        }
        ceilings = {
            f"hit_ceiling_{name}": self._reuse.ceiling(num_minutes, int(now_s))
            for name, num_minutes in WINDOW_MINUTES.items()
        }
        curve = {
            "hit_share_half": found(node_pages(0.5)),
            "hit_share_same": found(node_pages(1.0)),
            "hit_share_double": found(node_pages(2.0)),
        }
        self._figures = heard | {name: round(share, 4) for name, share in (ceilings | curve).items()}
        return self._figures
