# SPDX-License-Identifier: Apache-2.0
"""SGLang's router, ``cache_aware``, as far as what is found depends on it: it remembers what it sent where."""

from __future__ import annotations

from collections.abc import Sequence

from banyan_lab.sim.tree import Page

LEAST_SHARE = 0.3
"""Its ``--cache-threshold``: of a prompt, that must be known for affinity to decide."""


class ApproximateTrees:
    """One for each server, of all that it was ever sent: what the servers have evicted the router does not learn. With
    few requests under way its rule against imbalance never applies."""

    def __init__(self, num_servers: int) -> None:
        self._sent: list[set[Page]] = [set() for _ in range(num_servers)]

    def place(self, pages: Sequence[Page]) -> int:
        """The server that was sent most of the prompt, else the one that was sent least of all."""
        known = [self._known(sent, pages) for sent in self._sent]
        server = known.index(max(known))
        if known[server] <= LEAST_SHARE * len(pages):
            sizes = [len(sent) for sent in self._sent]
            server = sizes.index(min(sizes))
        self._sent[server].update(pages)
        return server

    def _known(self, sent: set[Page], pages: Sequence[Page]) -> int:
        return next((number for number, page in enumerate(pages) if page not in sent), len(pages))
