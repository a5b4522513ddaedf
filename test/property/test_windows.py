# SPDX-License-Identifier: Apache-2.0
"""Random operations over two frame tables: a leased page is never handed out, and no length comes without its window,
or without its state."""

import random

import pytest
from test.unit.cache_rig import request
from test.unit.directory.rig import NUM_FRAMES, frames, ids, key
from test.unit.test_restorable import WindowRank

from banyan._native import RankTable

NUM_OPERATIONS = 100_000
CHAINS = ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 10])
"""Two prompts with a common beginning."""


class FrameTable:
    """One kind of page of the owner: which page lies where, and which frames may be handed out."""

    def __init__(self, publish, retire, drain):
        self.publish, self._retire, self._drain = publish, retire, drain
        self.frame_of: dict[int, int] = {}
        self.free = set(range(NUM_FRAMES))
        self.leased: list[set[int]] = []
        """The frames of every fetch that holds some."""

    def offer(self, numbers):
        new = [number for number in numbers if number not in self.frame_of][: len(self.free)]
        taken = [self.free.pop() for _ in new]
        self.frame_of.update(zip(new, taken, strict=True))
        self.publish(frames(*taken), [key(number) for number in new])

    def retire(self, numbers):
        gone = [self.frame_of.pop(number) for number in numbers if number in self.frame_of]
        self.hand_out(self._retire(frames(*gone)))

    def drain(self):
        self.hand_out(self._drain())

    def hand_out(self, numbers):
        frees = set(ids(numbers))
        assert not any(frees & held for held in self.leased), "a page was handed out while it was leased"
        assert not frees & self.free
        self.free |= frees


class Node:
    """An owner, whose pages come and go, and a reader."""

    def __init__(self, seed, num_pages):
        """A length needs ``num_pages`` of the second kind before it: of a window several, of states one."""
        rank_table = RankTable.create(8)
        self.random, self.num_pages = random.Random(seed), num_pages
        self.owner, self.reader = (WindowRank(rank_table, slot, num_pages) for slot in range(2))
        cache, pages = self.owner.cache, self.owner.pages
        self.full = FrameTable(cache.publish, cache.retire, cache.drain)
        self.window = FrameTable(pages.frame_table.publish, pages.retire, pages.drain)
        self.queued: dict[str, tuple[list[int], list[int]]] = {}
        """The owner's frames that a fetch holds, in the order in which they were asked for."""
        self.num_asked = self.num_restored = self.num_refused = 0

    def some(self, numbers):
        return [number for number in numbers if self.random.random() < 0.5]

    def step(self):
        chain = self.random.choice(CHAINS)
        start = self.random.randrange(len(chain))
        choice = self.random.randrange(7)
        if choice == 0:
            self.full.offer(chain[: start + 1])
            self.window.offer(self.some(chain[: start + 1]) if start % 2 else chain[: start + 1])
        elif choice == 1:
            self.full.retire(self.some(chain[start:]))
        elif choice == 2:
            self.window.retire(self.some(chain[start:]))
        elif choice == 3:
            self.full.drain()
            self.window.drain()
        elif choice == 4 and len(self.queued) < 3:
            self.ask(chain)
        elif choice == 5 and self.queued:
            self.give_back(self.random.choice(list(self.queued)))
        elif choice == 6:
            self.move()

    def ask(self, chain):
        self.num_asked += 1
        rid = f"r{self.num_asked}"
        names = [key(number) for number in chain]
        most = self.reader.cache.prepare(request(rid), names).num_pages
        assert most == self.longest(chain)
        lengths = list(self.reader.cache.lengths(names, most))
        assert lengths == [length for length in range(most, 0, -1) if self.is_restorable(chain, length)]
        if not lengths:
            return
        length = self.random.choice(lengths)
        if self.random.random() < 0.3:  # Something happens between the lookup and the lease.
            self.random.choice((self.full, self.window)).retire(self.some(chain))
        window = chain[:length][-self.num_pages :][::-1]
        wanted = ([key(number) for number in window], frames(*range(8, 8 + len(window))))
        could = self.is_restorable(chain, length)
        fetch = self.reader.cache.admit(rid, names[:length], frames(*range(length)), wanted)
        assert (fetch is not None) <= could
        if fetch is None:
            self.num_refused += 1
            return
        held = tuple(
            [frame_table.frame_of[number] for number in numbers]
            for frame_table, numbers in ((self.full, chain[:length]), (self.window, window))
        )
        self.queued[rid] = held
        for frame_table, numbers in zip((self.full, self.window), held, strict=True):
            frame_table.leased.append(set(numbers))

    def longest(self, chain):
        return max((length for length in range(len(chain) + 1) if self.is_restorable(chain, length)), default=0)

    def is_restorable(self, chain, length):
        held = all(number in self.full.frame_of for number in chain[:length])
        return held and all(number in self.window.frame_of for number in chain[:length][-self.num_pages :])

    def let_go(self, rid):
        for frame_table, numbers in zip((self.full, self.window), self.queued.pop(rid), strict=True):
            frame_table.leased.remove(set(numbers))

    def give_back(self, rid):
        assert self.reader.cache.cancel(rid)
        self.let_go(rid)

    def move(self):
        if len(self.queued) > 1 or not self.queued:
            for rid in list(self.queued):
                self.give_back(rid)
            return
        (rid,) = self.queued
        full, window = self.queued[rid]
        index = self.reader.cache.start()
        assert self.reader.cache.finish(index)
        for frame, source in enumerate(full):
            assert self.reader.full.pages(frame) == self.owner.full.pages(source)
        for frame, source in enumerate(window, start=8):
            assert self.reader.window.pages(frame) == self.owner.window.pages(source)
        self.num_restored += 1
        self.let_go(rid)


@pytest.mark.parametrize("num_pages", [2, 1], ids=["windows", "states"])
def test_pages_when_anything_happens_in_any_order_then_no_leased_one_goes_and_no_window_is_missing(num_pages):
    node = Node(seed=11, num_pages=num_pages)
    for _ in range(NUM_OPERATIONS):
        node.step()
    # It was not all refusals, nor all grants.
    assert node.num_restored > 500 and node.num_refused > 100
