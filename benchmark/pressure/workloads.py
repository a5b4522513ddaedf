# SPDX-License-Identifier: Apache-2.0
"""Prompts as pages, drawn from recorded conversations or made: asked once, and once more in another order.

Pages of recorded conversations are named by everything up to their end, so two prompts share exactly their beginning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from banyan_lab.replay import formats
from banyan_lab.sim.tree import Page

LEAST_TOKENS, MOST_TOKENS = 1_500, 3_200
"""Of the prompts that are drawn: long enough to matter, short enough for eight of them in a rank's pool."""

DOCUMENT_PAGES = 144
HOT_SHARE = 4
"""In a scan one prompt in so many is of the hot set."""

SYSTEM_PAGES, FIRST_TURN_PAGES, TURN_PAGES = 30, 40, 8
LEAST_TURNS, MOST_TURNS, NUM_GOING = 3, 12, 12
"""Conversations of ``turns``: pages that all begin with, of a first turn, of each other; turns; how many at a time."""

SOURCES: Mapping[str, str] = MappingProxyType(
    {"agents": "lmcache_agent_trace/miniswe.jsonl.gz", "chats": "tau_bench/gpt-4o-airline.jsonl.gz"}
)

Prompts = list[list[Page]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is asked, first to last; the last ``num_measured`` count. ``is_twice``: these are the others once more, in
    another order."""

    prompts: Prompts
    num_measured: int
    is_twice: bool = False

    @property
    def num_distinct(self) -> int:
        """The working set, in pages: of what is asked more than once."""
        seen: dict[Page, int] = {}
        for prompt in self.prompts:
            for page in prompt:
                seen[page] = seen.get(page, 0) + 1
        return sum(1 for count in seen.values() if count > 1)


def twice(base: Sequence[list[Page]], rng: random.Random) -> Drawn:
    """All prompts, then all of them again in another order."""
    first, second = list(base), list(base)
    rng.shuffle(first)
    rng.shuffle(second)
    return Drawn(first + second, len(second), is_twice=True)


def recorded(path: Path) -> Callable[[int, int], Drawn]:
    """Draws prompts of a recorded log, by number of prompts and seed."""
    trace = formats.load(path)
    scopes = {scope: number for number, scope in enumerate(sorted({request.scope for request in trace.requests}))}
    fitting = [
        [scopes[request.scope] << 40 | block for block in request.block_ids()]
        for request in trace.requests
        if LEAST_TOKENS <= request.num_input_tokens <= MOST_TOKENS
    ]

    def draw(num_prompts: int, seed: int) -> Drawn:
        rng = random.Random(seed)
        return twice(rng.sample(fitting, min(num_prompts, len(fitting))), rng)

    return draw


def documents(num_prompts: int, seed: int) -> Drawn:
    """Long documents that share nothing."""
    return twice([_document(number) for number in range(num_prompts)], random.Random(seed))


def scan(num_prompts: int, seed: int) -> Drawn:
    """A hot set that is asked over and over, among prompts that never come back. What counts is the last quarter."""
    asked = list(_hot_turns(num_prompts, seed))
    for turn in range(len(asked)):
        if turn % HOT_SHARE:
            asked[turn] = _document(num_prompts + turn)
    return Drawn(asked, len(asked) // 4)


def hot(num_prompts: int, seed: int) -> Drawn:
    """The hot set of ``scan`` alone: what it would find without the scan."""
    asked = _hot_turns(num_prompts, seed)[::HOT_SHARE]
    return Drawn(asked, len(asked) // 4)


def _hot_turns(num_prompts: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    base = [_document(number) for number in range(num_prompts // HOT_SHARE)]
    return [rng.choice(base) for _ in range(16 * num_prompts)]


def _document(number: int) -> list[Page]:
    return list(range(number * 1_000, number * 1_000 + DOCUMENT_PAGES))


def turns(num_prompts: int, seed: int) -> Drawn:
    """Conversations that begin alike, grow with each turn and end; a dozen go on at a time. The second half counts."""
    rng = random.Random(seed)
    system = list(range(-SYSTEM_PAGES, 0))
    asked: Prompts = []
    going: dict[int, int] = {}
    number = 0
    while len(asked) < 4 * num_prompts:
        while len(going) < NUM_GOING:
            number += 1
            going[number] = rng.randrange(LEAST_TURNS, MOST_TURNS)
        chosen = rng.choice(sorted(going))
        num_past = sum(1 for prompt in asked if prompt[-1] // 1_000 == chosen)
        asked.append(system + _document(chosen)[: FIRST_TURN_PAGES + num_past * TURN_PAGES])
        going[chosen] -= 1
        if not going[chosen]:
            del going[chosen]
    return Drawn(asked, len(asked) // 2)


def all_from(folder: Path | None) -> dict[str, Callable[[int, int], Drawn]]:
    """Every workload there is; without a folder of recorded logs those that are made."""
    kinds: dict[str, Callable[[int, int], Drawn]] = {"documents": documents, "scan": scan, "hot": hot, "turns": turns}
    for name, file in SOURCES.items():
        if folder is not None and (folder / file).is_file():
            kinds[name] = recorded(folder / file)
    return kinds
