# SPDX-License-Identifier: Apache-2.0
"""Two ranks of a model with sliding windows on a GPU, driven at random: whatever a forward reads of a fetched prefix is
what belongs to its keys, though pages of both pools are freed, filled again, offered again and handed out meanwhile."""

import random

import pytest
import torch
from test.sglang_plugin.features.windows.window_gpu import PAGE, WINDOW_PAGES, WINDOWED, make_node
from test.unit.directory.rig import keys

from banyan.config import Config
from banyan.sglang_plugin.pools import allocator
from banyan.sglang_plugin.pools.device_offloads import DeviceOffloads
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder

SEEDS = range(12)
NUM_OPERATIONS = 1200
NUM_PROMPTS = 8
NUM_PAGES = 3
"""Of each prompt: as many as it has names."""


def names_of(prompt):
    return keys(*range(NUM_PAGES * prompt + 1, NUM_PAGES * (prompt + 1) + 1))


def values_of(prompt, num_pages):
    """What the tokens of its last pages hold: another value in each page of each prompt. bfloat16 knows all of them."""
    pages = [NUM_PAGES * prompt + page + 1 for page in range(NUM_PAGES)][-num_pages:]
    return torch.tensor(pages, dtype=torch.bfloat16).repeat_interleave(PAGE)


class Node:
    """A prompt in a rank's tree. SGLang holds it until it is told that it was published."""

    def __init__(self, prompt, full, window):
        self.prompt, self.full, self.window = prompt, full, window
        self.is_held = True


class NotPublishedError(Exception):
    """The frame table has not let a node's pages pass."""


class Driven:
    """A rank, and the part of SGLang that decides which pages it has."""

    def __init__(self, rank, chance):
        self.rank, self.chance = rank, chance
        self.nodes, self.pending = [], []
        self.wrong, self.num_checked = [], 0

    def poll(self):
        for _ in range(self.rank.poll()):
            if not self.rank.linker.pop_completed_offload():
                raise NotPublishedError
            self.pending.pop(0).is_held = False

    def _write(self, part, slots, prompt):
        values, pool = values_of(prompt, len(slots) // PAGE), self.rank.parts[part]
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            self.rank.gpu.enqueue(self.rank.forward, lambda b=buffer: b.__setitem__(slots, values[:, None, None]))

    def _alloc(self, pages, num_pages):
        """As SGLang: evict what nobody holds until there is room."""
        while pages.available_size() < num_pages * PAGE and self._evictable():
            self.evict()
        if pages.available_size() < num_pages * PAGE:
            return None
        with self.rank.on(self.rank.schedule):
            return pages.alloc(num_pages * PAGE)

    def _evictable(self):
        return [node for node in self.nodes if not node.is_held]

    def _pair(self):
        full = self._alloc(self.rank.full, NUM_PAGES)
        window = None if full is None else self._alloc(self.rank.window, WINDOW_PAGES)
        if full is not None and window is None:
            self.rank.free(full, full[:0])
        return full, window

    # ---- operations

    def compute(self):
        prompt = self.chance.randrange(NUM_PROMPTS)
        full, window = self._pair()
        if window is None or any(node.prompt == prompt for node in self.nodes):
            if window is not None:
                self.rank.free(full, window)
            return
        for part, slots in enumerate((full, window)):
            self._write(part, slots, prompt)
        self._insert(prompt, full, window)

    def _insert(self, prompt, full, window):
        self.rank.offload(names_of(prompt), full, window)
        self.nodes.append(Node(prompt, full, window))
        self.pending.append(self.nodes[-1])

    def evict(self):
        if self._evictable():
            node = self.chance.choice(self._evictable())
            self.nodes.remove(node)
            self.rank.free(node.full, node.full[:0] if node.window is None else node.window)

    def slide(self):
        """The window of a node goes, its full pages stay."""
        windowed = [node for node in self._evictable() if node.window is not None]
        if windowed:
            node = self.chance.choice(windowed)
            self.rank.free(node.full[:0], node.window)
            node.window = None

    def fill(self):
        """A tombstone has been computed through: it has its window again."""
        tombs = [node for node in self._evictable() if node.window is None]
        if not tombs:
            return
        node = self.chance.choice(tombs)
        node.is_held = True
        node.window = self._alloc(self.rank.window, NUM_PAGES)  # Of the whole node.
        node.is_held = False
        if node.window is not None:
            self._write(1, node.window, node.prompt)
            self.rank.offer_again(names_of(node.prompt), node.full, node.window)

    def fetch(self):
        prompt = self.chance.randrange(NUM_PROMPTS)
        rid = str(self.chance.random())
        if any(node.prompt == prompt for node in self.nodes) or self.rank.lookup(names_of(prompt), rid) != [NUM_PAGES]:
            return
        full, window = self._pair()
        if window is None:
            return
        if not self.rank.load_into(names_of(prompt), full, window, rid):
            self.rank.free(full, window)
            return
        index = self.rank.start()
        for layer in range(self.rank.pool.layer_num):
            self.rank.wait_until(layer)
            self.rank.gpu.enqueue(self.rank.forward, lambda layer=layer: self._check(layer, prompt, full, window))
        assert self.rank.finish(index)
        if self.chance.random() < 0.3:
            self.rank.free(full, window)  # Aborted.
        else:
            self._insert(prompt, full, window)

    def _check(self, layer, prompt, full, window):
        self.num_checked += 1
        values = values_of(prompt, WINDOW_PAGES if layer in WINDOWED else NUM_PAGES)
        if not bool((self.rank.layer(layer, full, window) == values[None, :, None, None]).all()):
            self.wrong.append((layer, prompt))


OPERATIONS = ("compute", "compute", "evict", "slide", "fill", "fill", "fetch", "fetch", "fetch")


def drive(monkeypatch, seed):
    """How many layers were read, and those that were not what their keys say."""
    chance = random.Random(seed)
    ranks = make_node(monkeypatch, Config(min_fetch_tokens=PAGE, host_gb=0.0), seed=seed)
    driven = [Driven(rank, chance) for rank in ranks]
    gpu = ranks[0].gpu

    def others_go_on(seconds):
        gpu.step()
        for rank in ranks:
            rank.poll_copies()

    monkeypatch.setattr(allocator.time, "sleep", others_go_on)
    for _ in range(NUM_OPERATIONS):
        one = chance.choice(driven)
        getattr(one, chance.choice(OPERATIONS))()
        for _ in range(chance.randrange(60)):
            gpu.step()
        chance.choice(driven).poll()
    gpu.run()
    return sum(one.num_checked for one in driven), [found for one in driven for found in one.wrong]


@pytest.mark.parametrize("seed", SEEDS)
def test_prefix_when_pages_come_and_go_at_random_then_a_forward_reads_what_belongs_to_its_keys(monkeypatch, seed):
    num_checked, wrong = drive(monkeypatch, seed)
    assert wrong == [] and num_checked > 100


def is_shown(monkeypatch, seed):
    """A wrong byte, or a page that is to be published under two keys."""
    try:
        return drive(monkeypatch, seed)[1] != []
    except NotPublishedError:
        return True


def test_prefix_when_freed_pages_overtake_what_was_offered_then_some_run_shows_it(monkeypatch):
    def withdraw_first(order):
        for sender in sorted(set(order._senders), key=lambda one: isinstance(one, DeviceOffloads)):
            while sender in order._senders and sender.take_next():
                order._senders.remove(sender)

    monkeypatch.setattr(ReadbackOrder, "take", withdraw_first)
    assert any(is_shown(monkeypatch, seed) for seed in range(40))
