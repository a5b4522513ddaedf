# SPDX-License-Identifier: Apache-2.0
"""What is kept of one server while somebody looks: some readings, and the hits of the last minutes.

Invariants
  1. A server is asked at most once in ``LEAST_AGE_S``, however many look.
  2. While nobody looks, nothing is asked.
  3. The tree is laid once for each reading, beside the event loop: a router's relays streams.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from banyan.observe.asking import Unanswered
from banyan.observe.prefix_tree import prefix_tree
from banyan.observe.rates import Looks, Rates
from banyan.observe.reading import HIT_SOURCES, Reading
from banyan.observe.request_history import decisions_of, sentences
from banyan.observe.summary import summary

LEAST_AGE_S = 1.0
PATIENCE_S = 2.0
"""Then what was seen last is told: one server that hangs does not hold up what the others tell."""
MAX_SAMPLES = 900
"""Of the history: half an hour of a page that looks every two seconds."""
NUM_RECENT = 20

Look = Callable[[str], Awaitable[Reading]]
"""From a server's URL. Raises ``Unanswered``."""


class Watched:
    """One server. One event loop."""

    def __init__(self, url: str, look: Look, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._look = look
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")
        self._looks = Looks()
        self._rates: Rates | None = None
        self._tree: list[dict[str, Any]] = []
        self._error = f"{url} has not answered yet"
        self._samples: deque[list[float]] = deque(maxlen=MAX_SAMPLES)

    async def told(self) -> dict[str, Any]:
        """What the page shows of it. ``error``: why it could not be asked; what was seen last stays beside it."""
        await self._refresh()
        if self._rates is None:
            return {"url": self.url, "error": self._error}
        return {
            "url": self.url,
            "error": self._error,
            **summary(self._rates),
            "tree": self._tree,
            "history": list(self._samples),
            "recent": self._recent(self._rates.now),
        }

    async def lives(self, rid: str) -> list[dict[str, Any]]:
        """What its ranks remember of a request: each decision, with the same in words."""
        await self._refresh()
        if self._rates is None:
            return []
        ranks = self._rates.now.ranks
        found = [plan for rank in ranks for plan in decisions_of(rid, rank.rid_nonce, rank.plans)]
        return [{**told, "url": self.url, "sentences": sentences(told)} for told in found]

    async def _refresh(self) -> None:
        """A new reading where the last one is old enough, or what there is until the server answers."""
        if self._asking is None or (self._asking.done() and self._clock() - self._asked_s >= LEAST_AGE_S):
            self._asking = asyncio.create_task(self._ask())
        done, _ = await asyncio.wait([self._asking], timeout=PATIENCE_S)
        for asking in done:
            asking.result()

    async def _ask(self) -> None:
        try:
            reading = await self._look(self.url)
            tree = await asyncio.to_thread(_tree_of, reading)
        except Unanswered as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001 - whoever looks is told, whatever it is
            self._error = f"{self.url} could not be looked at: {error!r}"
        else:
            self._error = ""
            self._rates, self._tree = self._looks.rates(reading), tree
            found = [reading.total(f"{source}_tokens") for source in HIT_SOURCES]
            self._samples.append([round(reading.taken_s, 2), *found, reading.total("prompt_tokens") - sum(found)])
        self._asked_s = self._clock()

    @staticmethod
    def _recent(reading: Reading) -> list[Mapping[str, Any]]:
        """The last decisions of all ranks, the latest first."""
        plans = [plan for rank in reading.ranks for plan in rank.plans]
        plans.sort(key=lambda plan: plan["planned_s"], reverse=True)
        return plans[:NUM_RECENT]


def _tree_of(reading: Reading) -> list[dict[str, Any]]:
    return [asdict(branch) for branch in prefix_tree(reading)]
