# SPDX-License-Identifier: Apache-2.0
"""Answers that nobody goes on from, as where a model's thoughts are left out of the next prompt: their pages go first.

It is learnt from prompts alone. One that goes on behind the page with which an older prompt ended has that one's answer
next, or something else instead. Where it is something else nearly always, answers are cold when they are given.

Invariants
  1. An answer is judged once, by the first prompt that goes on behind its own, if it was the last behind that. What one
     owner's clients do with their answers says nothing of another's; clients without an owner are one.
  2. Pages become cold only while of their owner's last judged answers at least ``LEAST_JUDGED`` are known, and no more
     than ``MOST_CONTINUED`` of them were gone on from. A page that a prompt asks for is cold no more.
  3. What is remembered is bounded; a page that is forgotten is one like any other.

One thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from banyan.latest import Latest

MOST_CONTINUED = 0.05
"""Of judged answers. What is lost where one of the few is gone on from is its own pages."""

LEAST_JUDGED, MOST_JUDGED = 32, 64
MOST_OWNERS = 1 << 10
MOST_PAGES = 1 << 16
"""Of answers that were not judged yet, and as many that are cold: some 10 MB."""


class Answers:
    def __init__(self) -> None:
        self._given: OrderedDict[str, list[str]] = OrderedDict()
        """By the page with which the prompt ends."""
        self._num_given_pages = 0
        self._judged: Latest[str | None, deque[bool]] = Latest(MOST_OWNERS)
        """Of the last answers of an owner, whether they were gone on from."""
        self._cold: Latest[str, None] = Latest(MOST_PAGES)

    def given(self, owner: str | None, prompt_end: str, keys: Sequence[str]) -> None:
        """Pages of an answer behind a prompt that nobody had asked for before; ``prompt_end`` is the last page of that,
        without a token of the answer."""
        self._num_given_pages += len(keys) - len(self._given.pop(prompt_end, ()))
        self._given[prompt_end] = list(keys)
        while self._num_given_pages > MOST_PAGES:
            self._num_given_pages -= len(self._given.popitem(last=False)[1])
        if self._are_cold(owner):
            self._cool(keys)

    def asked(self, owner: str | None, keys: Sequence[str]) -> list[str]:
        """A prompt of these pages has come. Pages of answers that it leaves out, and that are to go first."""
        for key in self._cold.keys() & keys:
            del self._cold[key]
        ends = self._given.keys() & keys[:-1]
        following = dict(pairwise(keys)) if ends else {}
        left_out: list[str] = []
        for prompt_end in ends:
            answer = self._given.pop(prompt_end)
            self._num_given_pages -= len(answer)
            is_continued = following[prompt_end] == answer[0]
            self._judged.used(owner, lambda: deque(maxlen=MOST_JUDGED)).append(is_continued)
            left_out += [] if is_continued else answer
        if not left_out or not self._are_cold(owner):
            return []
        self._cool(left_out)
        return left_out

    def cold(self, keys: Iterable[str]) -> list[str]:
        """Those of these pages that are cold, in their order."""
        return [key for key in keys if key in self._cold] if self._cold else []

    def forget(self) -> None:
        """No page of before can be found any more. What owners do with their answers stays known."""
        self._given.clear()
        self._cold.clear()
        self._num_given_pages = 0

    def _are_cold(self, owner: str | None) -> bool:
        judged = self._judged.get(owner, ())
        return len(judged) >= LEAST_JUDGED and sum(judged) <= MOST_CONTINUED * len(judged)

    def _cool(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._cold.put(key, None)
