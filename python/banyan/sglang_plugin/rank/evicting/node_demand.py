# SPDX-License-Identifier: Apache-2.0
"""The demand for pages as one rank knows it: what its own prompts ask for, and, told by its peers, what theirs do.

A rank evicts for the node: what it drops is lost to all, and what comes back may come back to another rank. So each
rank tells the others of the prompts that come to it, and learns from theirs as from its own. Pages go by keys here.
Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from banyan import _native
from banyan.cache import PrefixCache
from banyan.telemetry import PAGE_BYTES, Counters, NodeReuse, PromptAnswer


class NodeDemand:
    """One rank's. ``others``: what the other ranks of the node read, and what is read of them; something may be missed.
    None where there is no other. ``num_frames``: of the pools of all ranks that hear each other. ``reuse``: told of the
    same."""

    def __init__(self, others: PrefixCache | None, num_frames: int, counters: Counters, reuse: NodeReuse) -> None:
        self._others = others
        self._counters = counters
        self._reuse = reuse
        self._demand = _native.Demand(num_frames)

    def hear(self) -> None:
        """Take what the peers have told since."""
        for message in () if self._others is None else self._others.peer_accesses():
            if not message[0] & 1:
                # The rest of what was told too long ago: of a prompt or of an answer, nobody knows.
                continue
            answered = PromptAnswer.of(message)
            if answered is not None:
                self._reuse.answered(answered)
                continue
            self._demand.peer_access(message)
            self._reuse.asked(message)
            self._counters.peer_prompts += 1

    def tell(self, keys: list[str]) -> bytes:
        """A request has come with a prompt of these pages, at least one: tell the peers. Gives the pages' numbers."""
        self.hear()
        pages = _native.page_numbers(keys)
        if self._others is not None:
            self._others.log_access(pages)
        self._reuse.asked(pages)
        return pages

    def asked(self, pages: bytes, request: str) -> int:
        """The request waits until it is ``served``. How many of its first pages prompts of before had asked for, here
        or at a peer, since the weights changed."""
        return self._demand.asked(pages, request)

    def weights_changed(self) -> None:
        """What was asked for before can be found no more. How pages come back stays learnt."""
        self.hear()
        self._demand.weights_changed()
        self._reuse.begin_anew()

    def answered(self, num_tokens: int, pages: bytes, num_cached: int) -> None:
        """The answer to a prompt of these pages begins. So many of them were found."""
        one = PromptAnswer(num_tokens, len(pages) // PAGE_BYTES, pages[num_cached * PAGE_BYTES :])
        if self._others is not None:
            self._others.log_access(one.message())
        self._reuse.answered(one)

    def served(self, request: str) -> None:
        """The request waits no longer, if it did."""
        self._demand.served(request)

    def came(self, keys: list[str]) -> None:
        """The tree has these pages of one chain now."""
        pages = _native.page_numbers(keys)
        self._demand.came(pages)
        self._reuse.came(pages)

    def reuse_probabilities(self, keys: list[str]) -> Sequence[float]:
        """Of each page to be wanted, as against other pages; infinite while a request waits here that asks for it."""
        return self._demand.reuse_probabilities(_native.page_numbers(keys))

    def is_asked_again(self, key: str) -> bool:
        """Whether more than one prompt has asked for the page."""
        _, num_accesses = self._demand.age_and_accesses(_native.page_number(key))
        return num_accesses > 1

    def state(self) -> dict[str, float]:
        """What has been learnt, for people."""
        age_power, frequency_power = self._demand.powers
        return {"age_power": round(age_power, 2), "frequency_power": round(frequency_power, 2)}
