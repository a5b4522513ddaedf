# SPDX-License-Identifier: Apache-2.0
"""What placing one request of 2,000 pages costs the dispatcher: hashing, lookup in every rank, policy, books.

Three prompts: one that comes back (its hashes are remembered), one that ranks hold but this dispatcher has not seen
(as many pages are hashed as one request may cost), one that nobody holds (hashed to the first chunk only). Reading
SGLang's load snapshots and packing the hint belong to the plugin; ``dispatch_us`` of a running server has them too.
And the worst: all ranks hold all pages but the last, and many prompts that begin alike are on their way to each.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from banyan._native import FrameTable, PageKeys, Peers, PromptTokens, RankTable, SharedBytes
from banyan.config import DEFAULT_POLICY
from banyan.routing import POLICIES, Dispatcher, LoadReport, Prompt
from banyan.routing.dispatcher import MAX_HASHED_PAGES

NUM_PAGES = 2_000
PAGE_TOKENS = 16
NUM_RANKS = 8
NUM_PUBLISHED = 20_000
NUM_ROUNDS = 201
NUM_PENDING = 32
NUM_CHUNKS = 16_384
NAMESPACE = b"b" * 32
PAGE_BYTES = 64
VOCABULARY = 49_152

Found: TypeAlias = tuple[list[int], PromptTokens]


class _Node:
    """Ranks that all hold the same prompt among many other pages, and the dispatcher's view of them."""

    def __init__(self, num_ranks: int, prompt: array[int]) -> None:
        self.rank_table = RankTable.create(num_ranks)
        geometry = [[(0, PAGE_BYTES)]]
        keys = PageKeys(PAGE_TOKENS, 1).of(None, prompt)
        order = np.random.default_rng(1)
        self.frame_tables = []
        for slot in range(num_ranks):
            pool = SharedBytes.create(NUM_PUBLISHED * PAGE_BYTES, f"bench-{slot}")
            frame_table = FrameTable(self.rank_table, slot, NAMESPACE, pool, NUM_PUBLISHED, geometry)
            others = (hashlib.sha256(b"%d %d" % (slot, number)) for number in range(NUM_PUBLISHED - NUM_PAGES))
            frame_table.publish(order.permutation(NUM_PUBLISHED), keys + [other.hexdigest() for other in others])
            self.frame_tables.append(frame_table)
        self.peers = Peers(self.rank_table, None, 0, NAMESPACE, [], None)


def run() -> list[dict[str, Any]]:
    """One row for each number of ranks: medians and 99th percentiles over the rounds, in microseconds."""
    return [_measure(num_ranks) for num_ranks in (2, NUM_RANKS)]


def _measure(num_ranks: int) -> dict[str, Any]:
    prompt, stranger = _tokens(0), _tokens(1)
    node = _Node(num_ranks, prompt)
    warm = PageKeys(PAGE_TOKENS, NUM_CHUNKS)

    def found(page_keys: PageKeys, tokens: array[int]) -> Found:
        prompt = PromptTokens(None, tokens, PAGE_TOKENS)
        return node.peers.prefix_lens_of(page_keys, prompt, MAX_HASHED_PAGES), prompt

    def look_up(page_keys: PageKeys, tokens: array[int]) -> list[int]:
        return found(page_keys, tokens)[0]

    # One look hashes a part of it.
    for _ in range(NUM_PAGES // MAX_HASHED_PAGES + 1):
        look_up(warm, prompt)
    assert look_up(warm, prompt) == [NUM_PAGES] * num_ranks
    assert not any(look_up(warm, stranger))
    row: dict[str, Any] = {"num_pages": NUM_PAGES, "num_ranks": num_ranks, "num_rounds": NUM_ROUNDS}
    row |= _percentiles("lookup_known", lambda: look_up(warm, prompt))
    row |= _percentiles("lookup_new_to_dispatcher", lambda: look_up(PageKeys(PAGE_TOKENS, 1), prompt))
    row |= _percentiles("lookup_nobody_holds", lambda: look_up(warm, stranger))
    for name, make in POLICIES.items():
        place = _placing(Dispatcher(num_ranks, make()), num_ranks, lambda: found(warm, prompt))
        row |= _percentiles(f"dispatch_known_{name}", place)
    crowded = Dispatcher(num_ranks, POLICIES[DEFAULT_POLICY]())
    continued = prompt[:-PAGE_TOKENS] + stranger[:PAGE_TOKENS]
    _crowd(crowded, num_ranks, continued)
    place = _placing(crowded, num_ranks, lambda: found(warm, continued))
    row |= _percentiles(f"dispatch_pending_{DEFAULT_POLICY}", place)
    return row


def _crowd(dispatcher: Dispatcher, num_ranks: int, tokens: array[int]) -> None:
    """Send prompts to every rank that begin like ``tokens``, half of it in common."""
    half = len(tokens) // 2
    for number in range(NUM_PENDING * num_ranks):
        other = PromptTokens(None, tokens[:half] + array("q", [number]) + tokens[half:], PAGE_TOKENS)
        dispatcher.count(Prompt(len(other), tokens=other), number % num_ranks, 0.0)


def _placing(dispatcher: Dispatcher, num_ranks: int, look_up: Callable[[], Found]) -> Callable[[], object]:
    now_s = 0.0

    def place() -> object:
        nonlocal now_s
        now_s += 1.0
        num_pages_by_rank, prompt = look_up()
        tokens = [num_pages * PAGE_TOKENS for num_pages in num_pages_by_rank]
        for rank in range(num_ranks):
            dispatcher.reported(rank, LoadReport(taken_s=now_s, num_running=4, ongoing_tokens=40_000))
        asked = Prompt(NUM_PAGES * PAGE_TOKENS, tokens, max(tokens), session="one", tokens=prompt)
        return dispatcher.place(asked, range(num_ranks), now_s)

    return place


def _tokens(seed: int) -> array[int]:
    return array("q", np.random.default_rng(seed).integers(0, VOCABULARY, NUM_PAGES * PAGE_TOKENS).tolist())


def _percentiles(name: str, call: Callable[[], object]) -> dict[str, float]:
    micros = []
    for _ in range(NUM_ROUNDS):
        start_ns = time.perf_counter_ns()
        call()
        micros.append((time.perf_counter_ns() - start_ns) / 1e3)
    return {f"{name}_us": statistics.median(micros), f"{name}_p99_us": statistics.quantiles(micros, n=100)[98]}
