# SPDX-License-Identifier: Apache-2.0
"""How the data path and the planner speak of one request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from banyan.core import Offer, PrefixSpan, Run
from banyan.layout import cacheable_tokens
from banyan.planner.plan import Tail
from banyan.planner.planner import Action


class RequestFacts(msgspec.Struct, frozen=True):
    """What is known of a request, asked for once.

    ``id``: the rank's own (``banyan.core.request_id``). ``prompt_tokens`` counts the answer so far where that is
    computed again; None for a request that did not arrive where Banyan looks. ``asked``: what it wants to be done with
    its tail. ``max_rank``: who holds the longest prefix, as far as was seen before this look; -1: nobody.
    ``tokens_ahead``: behind a page, on which its key depends. ``most_cached_tokens``: no longer prefix is looked for:
    all but a token, or less where the answer is to say something of each token of the prompt from there on.
    """

    id: str
    prompt_tokens: int | None
    page_tokens: int
    asked: Action | None
    max_rank: int = -1
    tokens_ahead: int = 0
    most_cached_tokens: int = 0

    def tail(self, num_pages: int, runs: Sequence[Run], rank: int = -1) -> Tail | None:
        """The last ``num_pages`` that a cache could supply, where the first of them were found, and at which rank."""
        if self.prompt_tokens is None:
            return None
        return Tail(self._own_tokens(num_pages), self.prompt_tokens, self.page_tokens, tuple(runs), rank)

    def span(self, num_pages: int, offer: Offer) -> PrefixSpan:
        """What is cached of the prompt when its last ``num_pages`` are offered so."""
        own_tokens = self._own_tokens(num_pages)
        return PrefixSpan(own_tokens, own_tokens + offer.num_pages * self.page_tokens, offer.rank)

    def _own_tokens(self, num_pages: int) -> int:
        """What lies before the last ``num_pages`` of what is looked for: these are missing in the rank's own tree."""
        most = cacheable_tokens(self.most_cached_tokens + 1, self.page_tokens, self.tokens_ahead)
        return most - num_pages * self.page_tokens
