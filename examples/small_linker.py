# SPDX-License-Identifier: Apache-2.0
"""Two ranks in one process that share pages, without SGLang: what ``sglang_plugin/rank`` is, with nothing around it.

    python examples/small_linker.py

A ``SmallRank`` owns a pool of pages in shared memory and announces it in a frame table (``FrameTable``). ``lookup``,
``load``, ``start``, ``wait_layer``, ``finish`` and ``offload`` are the calls that SGLang makes of a linker, in this
order; the decisions behind them are ``banyan.cache``'s. docs/tour.md walks through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from banyan._native import FrameTable, Peers, RankTable, SharedBytes
from banyan.cache import PrefixCache
from banyan.core import Fetch, Offer, Outcome, SourceKind
from banyan.layout import Layout, MemberSlots
from banyan.restorable import KindPages
from banyan.supply import Supply
from banyan.telemetry import Counters

NUM_FRAMES, NUM_LAYERS, LAYER_BYTES, PAGE_TOKENS = 64, 4, 256, 16
NAMESPACE = hashlib.sha256(b"a model, its weights, its layout").digest()
LAYOUT = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=1)


def page_keys(tokens: Sequence[int]) -> list[str]:
    """The keys of the whole pages of a prompt: each names the page's tokens and all before them."""
    keys: list[str] = []
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        page = np.array(tokens[end - PAGE_TOKENS : end], dtype=np.int64).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else "").encode() + page).hexdigest())
    return keys


@dataclass(frozen=True)
class Request:
    id: str
    max_rank: int = -1
    """The rank that is said to hold the most of its prompt; -1: nobody has said."""


class FetchAll:
    """A planner that moves all that is found. The real one compares measured times (``banyan.planner``)."""

    def num_to_read(self, request: Request, num_missing: int, num_found: int, kind: SourceKind, /) -> int:
        return num_found

    def started(self, fetches: Sequence[Fetch]) -> None: ...
    def became(self, request: str, outcome: Outcome) -> None: ...
    def moved(self, fetches: Sequence[Fetch], copy_s: float) -> None: ...
    def was_read(self, kind: SourceKind, num_pages: int, read_s: float) -> None: ...


class SmallRank:
    """One rank: ``pool`` is ``[layer, frame, byte]``, what SGLang's KV pool is to a real one."""

    def __init__(self, rank_table: RankTable, rank: int) -> None:
        memory = SharedBytes.create(NUM_LAYERS * NUM_FRAMES * LAYER_BYTES, f"pool of rank {rank}")
        self.pool = np.frombuffer(memory, dtype=np.uint8).reshape(NUM_LAYERS, NUM_FRAMES, LAYER_BYTES)
        # Where the bytes of each layer lie: offset of frame 0, bytes of a page there.
        geometry = [[(layer * NUM_FRAMES * LAYER_BYTES, LAYER_BYTES)] for layer in range(NUM_LAYERS)]
        frame_table = FrameTable(rank_table, rank, NAMESPACE, memory, NUM_FRAMES, geometry)
        peers = Peers(rank_table, rank, rank, NAMESPACE, geometry, memory)
        member_slots = MemberSlots(LAYOUT, rank, 0)
        self.counters = Counters()
        self.cache: PrefixCache[Request] = PrefixCache(
            member_slots=member_slots,
            page_tokens=PAGE_TOKENS,
            full=KindPages(frame_table, Supply(peers, member_slots.peers, prefetch=None)),
            beside=(),
            planner=FetchAll(),
            agreed=lambda granted: granted,  # this process is the whole rank
            counters=self.counters,
        )

    def lookup(self, rid: str, keys: Sequence[str]) -> Offer:
        """How many leading pages of ``keys`` others can supply. A hint: nothing is held yet."""
        return self.cache.prepare(Request(rid), keys)

    def load(self, rid: str, keys: Sequence[str], frames: Sequence[int]) -> bool:
        """Lease exactly these pages for these frames, all or none. False: compute them."""
        return self.cache.admit(rid, keys, _frames(frames)) is not None

    def start(self) -> int:
        """Begin to copy all that was leased; the number of the batch."""
        return self.cache.start()

    def wait_layer(self, index: int, layer: int) -> None:
        """Return once ``layer`` of the batch is in place; what the attention of that layer calls first."""
        copy = self.cache.moving(index)
        if copy is not None:
            copy.wait_layer(layer)

    def finish(self, index: int) -> bool:
        """After the forward: whether every page landed and is good. False: what was computed on them is thrown away."""
        return self.cache.finish(index)

    def offload(self, keys: Sequence[str], frames: Sequence[int]) -> None:
        """These pages are complete: offer them to the others."""
        self.cache.publish(_frames(frames), keys)

    def free(self, frames: Sequence[int]) -> list[int]:
        """Take pages back; those that may be written again now. One that a peer reads comes out of ``drain`` later."""
        return [int(frame) for frame in np.frombuffer(self.cache.retire(_frames(frames)), dtype=np.int64)]


def _frames(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def main() -> None:
    rank_table = RankTable.create(LAYOUT.num_ranks)
    first, second = SmallRank(rank_table, 0), SmallRank(rank_table, 1)
    prompt = list(range(100))
    keys = page_keys(prompt)

    # Rank 0 computes the prompt, and its pages enter its tree.
    frames = list(range(10, 10 + len(keys)))
    first.pool[:, frames] = np.random.default_rng(0).integers(0, 256, (NUM_LAYERS, len(keys), LAYER_BYTES))
    first.offload(keys, frames)

    # Rank 1 gets a longer one that begins alike.
    longer = page_keys([*prompt[:96], *range(500, 540)])
    offer = second.lookup("r1", longer)
    print(f"rank 1 finds {offer.num_pages} of {len(longer)} pages: {offer.runs}")
    found, targets = longer[: offer.num_pages], list(range(offer.num_pages))
    assert second.load("r1", found, targets)
    index = second.start()
    for layer in range(NUM_LAYERS):
        second.wait_layer(index, layer)
        assert (second.pool[layer, targets] == first.pool[layer, frames[: len(found)]]).all()
    assert second.finish(index)
    print(f"copied {second.counters.fetched_bytes} bytes, all equal")
    print(f"rank 0 may write {len(first.free(frames))} of its {len(frames)} pages again")


if __name__ == "__main__":
    main()
