# SPDX-License-Identifier: Apache-2.0
"""The last prompts of a rank as chains of page keys: what the tree of shared prefixes is drawn from.

Of each prompt at most ``MAX_MARKS`` keys are kept, every n-th, n a power of two: so two prompts can be compared at the
places that both have, and where they part is known to the distance between two marks of the longer one. A prompt that
continues another takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_PROMPTS = 32
MAX_MARKS = 64


@dataclass(slots=True)
class _Prompt:
    rid: str
    seen_s: float
    num_pages: int
    first_key: str
    places: Sequence[int]
    keys: list[str]
    num_turns: int


@dataclass(frozen=True, slots=True)
class Holding:
    """How many leading marks of a prompt each rank's pool holds, as far as this node knows, and the arena."""

    pools: Sequence[int]
    arena: int


class RecentPrompts:
    """Prompts that this rank was asked, the latest last. One thread."""

    def __init__(self, page_tokens: int, max_prompts: int = MAX_PROMPTS) -> None:
        self._page_tokens = page_tokens
        self._max_prompts = max_prompts
        self._prompts: list[_Prompt] = []

    def saw(self, rid: str, keys: Sequence[str], now_s: float) -> None:
        """A request has come whose prompt has these pages. ``now_s``: since the epoch."""
        if not keys:
            return
        num_turns = 1
        for place, old in enumerate(self._prompts):
            # Two keys that differ, mostly in their first character, are soon told apart.
            if old.first_key == keys[0] and old.num_pages <= len(keys) and keys[old.num_pages - 1] == old.keys[-1]:
                num_turns += old.num_turns
                del self._prompts[place]
                break
        places, picked = marked(keys)
        self._prompts.append(_Prompt(rid, now_s, len(keys), keys[0], places, picked, num_turns))
        del self._prompts[: -self._max_prompts]

    def state(self, look: Callable[[list[str]], Holding]) -> list[dict[str, Any]]:
        """The prompts and who holds how many leading tokens of each, as plain values; the latest last."""
        return [self._told(prompt, look(prompt.keys)) for prompt in self._prompts]

    def _told(self, prompt: _Prompt, holding: Holding) -> dict[str, Any]:
        def tokens(num_marks: int) -> int:
            return prompt.places[num_marks - 1] * self._page_tokens if num_marks else 0

        return {
            "rid": prompt.rid,
            "seen_s": round(prompt.seen_s, 3),
            "num_tokens": prompt.num_pages * self._page_tokens,
            "num_turns": prompt.num_turns,
            "marks": [[place * self._page_tokens, key] for place, key in zip(prompt.places, prompt.keys, strict=True)],
            "pools": [tokens(num_marks) for num_marks in holding.pools],
            "arena": tokens(holding.arena),
        }


def marked(keys: Sequence[str]) -> tuple[Sequence[int], list[str]]:
    """The pages whose keys are kept, counted from 1: multiples of a power of two, and the last; and these keys."""
    num_pages, step = len(keys), 1
    while num_pages // step > MAX_MARKS - 1:
        step *= 2
    places, picked = range(step, num_pages + 1, step), list(keys[step - 1 :: step])
    return (places, picked) if num_pages % step == 0 else ([*places, num_pages], [*picked, keys[-1]])
