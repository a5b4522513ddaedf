# SPDX-License-Identifier: Apache-2.0
"""What other nodes have of the prompts that come to one rank, behind its arena and its store.

Invariants, beside those of ``RemoteTier``
  1. A request on a remote prefetch is awaited no longer than `REMOTE_PREFETCH_PATIENCE_S`.
  2. What a remote prefetch does not bring is read from the own store.

A remote prefetch is a question that another node answers when it has brought the pages from its store. One thread
calls; nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from banyan.arena.page_source import Wanted, Worth
from banyan.arena.prefetch import Prefetch
from banyan.arena.remote_tier import RemoteTier
from banyan.core import Run, SourceKind
from banyan.features.nodes.borrower import Borrower
from banyan.features.nodes.pull import NodeFound
from banyan.ports import StoreRead
from banyan.telemetry import Counters

REMOTE_PREFETCH_PATIENCE_S = 12.0
"""Longer than anybody who sends waits for the end of a remote prefetch."""


Choose = Callable[[str, int, Sequence[Run]], int]
"""Of a request, the ``num_missing`` last pages of whose prompt several nodes have, the one with the most first: which
of them is to bring them."""


def the_first(request: str, num_missing: int, found: Sequence[Run]) -> int:
    return 0


class NodeTier(RemoteTier[NodeFound]):
    """One rank's prompts at the other nodes.

    ``told`` knows of a request which nodes' arenas were said to have more of its prompt, None where nothing was said.
    ``choose``: from whom to pull it.
    """

    def __init__(
        self,
        nodes: Borrower,
        *,
        prefetch: Prefetch,
        counters: Counters,
        clock: Callable[[], float],
        told: Callable[[str], Sequence[str] | None] = lambda request: None,
        choose: Choose = the_first,
    ) -> None:
        # No method of its own: a tier that is part of a cycle would keep its reader's place after it was let go.
        pull = partial(_pull, nodes, prefetch)
        super().__init__(nodes, bring=pull, prefetch=prefetch, counters=counters, clock=clock)
        self._nodes = nodes
        self._told = told
        self._choose = choose
        self._sent_for: set[str] = set()
        self._remote_prefetches: dict[int, int] = {}
        """Of the questions that are remote prefetches: how many pages the node was sent for."""

    def ask(self, wanted: Wanted) -> int:
        """As ``RemoteTier.ask``. Where it was said that only some nodes have what this one lacks, none but they are
        asked, and nobody where there are none. Of nodes that are not this rank's nobody has a say."""
        sources = self._told(wanted.request)
        known = [node for node in sources or () if self._nodes.knows(node)]
        if sources is None or (sources and not known):
            return super().ask(wanted)
        if known:
            self._counters.questions_directed += self._put(wanted, partial(self._nodes.ask_at, known))
        else:
            self._counters.questions_spared += bool(wanted.missing)
        return wanted.num_held

    def send(self, wanted: Wanted, node: str, num_pages: int) -> bool:
        """Have ``node`` bring the first ``num_pages`` of what is missing; whether it was asked to. What it has brought
        is pulled; what it has not is read here."""
        number = self._nodes.send(node, wanted.missing[:num_pages])
        if number is None:
            return False
        self._counters.remote_prefetches_sent += 1
        self._questions[number], self._remote_prefetches[number] = wanted, num_pages
        self._await(wanted.request, REMOTE_PREFETCH_PATIENCE_S)
        self._sent_for.add(wanted.request)
        return True

    def is_sent_for(self, request: str) -> bool:
        """Whether another node is reading for this request: nobody else is to read the same."""
        return request in self._sent_for and self.is_awaited(request)

    def _await_no_longer(self, request: str) -> None:
        super()._await_no_longer(request)
        self._sent_for.discard(request)

    def _end(self, number: int, wanted: Wanted, found: NodeFound | None) -> None:
        num_sent_for = self._remote_prefetches.pop(number, None)
        if num_sent_for is None:
            super()._end(number, wanted, found)
            return
        rest = self._bring_rest(wanted, found)
        num_brought = 0 if found is None else found.num_pages
        self._counters.remote_prefetches_failed += num_brought < num_sent_for
        self._prefetch.start_reads(rest.missing, rest.worth, behind=rest.behind)

    def _bring_rest(self, wanted: Wanted, found: NodeFound | None) -> Wanted:
        if found is not None and found.others:
            nodes, num_come = (found, *found.others), self._prefetch.num_in_arena(wanted.missing)
            # A trial is put for the pages that are going to be asked for, or it is lost.
            runs = [Run(SourceKind.REMOTE, max(0, node.num_pages - num_come), node.origin) for node in nodes]
            found = nodes[self._choose(wanted.request, len(wanted.missing) - num_come, runs)]
        return super()._bring_rest(wanted, found)

    def forget(self) -> None:
        super().forget()
        self._nodes.give_up()
        self._sent_for.clear()
        self._remote_prefetches.clear()

    def close(self) -> None:
        self._nodes.close()


def _pull(
    nodes: Borrower, prefetch: Prefetch, keys: Sequence[str], worth: Worth, found: NodeFound, behind: Sequence[str]
) -> None:
    # It pulls only what it has found itself; a protocol cannot say that.
    prefetch.start_pull(keys, worth, found, cast(Callable[..., StoreRead], nodes.read), found.origin, behind)
