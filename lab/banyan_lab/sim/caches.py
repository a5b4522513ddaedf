# SPDX-License-Identifier: Apache-2.0
"""Which pages lie where, on one node: in the pool of each rank, and in the host arena.

A pool is the engine's radix cache. Its leaves go in the shipped walks (``banyan.planner.victims``): by age, as stock
SGLang evicts, or by their reload cost, as Banyan does. The arena's eviction is ``banyan.arena.Residency``, the shipped
code, over a frame table that copies nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from banyan._native import Demand
from banyan.arena.residency import Residency
from banyan.core import SourceKind
from banyan.planner.victims import NEAR_LEAVES, Leaf, Looks
from banyan_lab.sim.tree import Tree, Victims, page_numbers

Page = str


class Pool:
    """Pages in the pool of one rank, which hears what ``num_ranks`` like it are asked for. ``reload_cost`` says where
    else a page lies and what it costs to lose it; None: by age. ``gone`` is told every page that leaves.

    Pages have numbers here, so that a run does not depend on how strings hash.
    """

    def __init__(
        self,
        num_pages: int,
        reload_cost: Callable[[Page, float], tuple[SourceKind | None, float]] | None = None,
        num_ranks: int = 1,
        gone: Callable[[Page], None] = lambda page: None,
    ) -> None:
        self._numbers: dict[Page, int] = {}
        self._pages: list[Page] = []
        self._demand = Demand(num_pages * num_ranks)
        self._reload_cost = reload_cost
        how = (
            Victims(self._by_age, 1)
            if reload_cost is None
            else Victims(self._by_reload_cost, NEAR_LEAVES, Looks(), splits=True)
        )
        self._tree = Tree(num_pages, victims=how, gone=lambda number: gone(self._pages[number]))

    def __contains__(self, page: Page) -> bool:
        number = self._numbers.get(page)
        return number is not None and number in self._tree

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._tree.num_free

    def prefix(self, pages: Sequence[Page]) -> int:
        """How many leading pages are here."""
        for number, page in enumerate(pages):
            if page not in self:
                return number
        return len(pages)

    def asked(self, pages: Sequence[Page], prompt: int) -> None:
        """A prompt of these pages was sent to the rank, and waits until it is ``served``."""
        if pages:
            self._demand.asked(page_numbers(map(self._number, pages)), str(prompt))

    def heard(self, pages: Sequence[Page]) -> None:
        """A prompt of these pages was sent to another rank."""
        if pages:
            self._demand.peer_access(page_numbers(map(self._number, pages)))

    def served(self, prompt: int) -> None:
        """The prompt waits no longer."""
        self._demand.served(str(prompt))

    def insert(self, pages: Sequence[Page]) -> None:
        """Put a prompt's pages here, most recently used, as far as they fit."""
        numbers = [self._number(page) for page in pages]
        num_held = self._tree.match(numbers)
        self._tree.lock(numbers[:num_held])
        if num_held:
            self._tree.touch(numbers[:num_held])
        self._tree.unlock(numbers[: self._tree.insert(numbers, num_held)])

    def _number(self, page: Page) -> int:
        number = self._numbers.setdefault(page, len(self._pages))
        if number == len(self._pages):
            self._pages.append(page)
        return number

    def _by_age(self, numbers: Sequence[int]) -> list[Leaf]:
        return [Leaf(number, self._pages[number], None, 0.0) for number in numbers]

    def _by_reload_cost(self, numbers: Sequence[int]) -> list[Leaf]:
        assert self._reload_cost is not None
        pages = [self._pages[number] for number in numbers]
        chances = self._demand.reuse_probabilities(page_numbers(numbers))
        reload_costs = [self._reload_cost(page, chance) for page, chance in zip(pages, chances, strict=True)]
        return [
            Leaf(number, page, *reload_cost)
            for number, page, reload_cost in zip(numbers, pages, reload_costs, strict=True)
        ]


class BareFrameTable:
    """An ``ArenaFrameTable`` without memory: remembers which frames were leased."""

    def __init__(self) -> None:
        self.touched: set[int] = set()

    def publish(self, frames: Sequence[int], keys: Sequence[str]) -> int:
        return len(frames)

    def retire(self, frames: Sequence[int]) -> bytes:
        return array("q", frames).tobytes()

    def drain(self) -> bytes:
        return b""

    def take_touched(self, frames: Sequence[int]) -> bytes:
        seen = [frame for frame in frames if frame in self.touched]
        self.touched.difference_update(seen)
        return array("q", seen).tobytes()


class Arena:
    """A DRAM tier. ``num_pages`` 0: there is none."""

    def __init__(self, num_pages: int) -> None:
        self._frame_table = BareFrameTable()
        self._residency = Residency(self._frame_table, num_pages) if num_pages else None

    @property
    def has_room(self) -> bool:
        """Whether there is a frame that holds nothing."""
        return self._residency is not None and self._residency.num_free > 0

    def prefix(self, pages: Sequence[Page], start: int) -> int:
        """How many leading pages are here if the first ``start`` come from elsewhere; the others count as used."""
        if self._residency is None:
            return 0
        for number in range(start, len(pages)):
            frame = self._residency.frame(pages[number])
            if frame is None:
                return number
            self._frame_table.touched.add(frame)
        return len(pages)

    def insert(self, pages: Sequence[Page]) -> None:
        """Take in what is not here, as far as something else may go for it."""
        if self._residency is None:
            return
        new = [page for page in pages if self._residency.frame(page) is None]
        frames = self._residency.claim(len(new))
        self._residency.publish(frames, new[: len(frames)])
