# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV events: the wire format, and one rank's feed of them.

Invariants
  1. ``blocks`` holds nothing that was removed: after a hole that could not be filled it starts again empty. Too
     little known costs a cache hit, too much would send requests after pages that are gone.
  2. Batches are applied in order, each once.
  3. It ``is_whole`` only while nothing that the rank has in pool and arena is missing: it has heard all from the first
     batch on, or from when everything was forgotten. Of the store a rank tells bit by bit, and not all of a large one.

A feed is new (``next_seq`` is None), in step, or behind: ``first_missing`` says from where to ask again.
"""

from __future__ import annotations

import math

import msgspec

from banyan.decoding import decoded
from banyan.router.blocks import POOL, RankBlocks


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Pages entered a rank's cache. Token ids and what else the event carries are not read."""

    block_hashes: list[int]
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Pages left one medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The rank has forgotten everything."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What a rank's publisher sends as one message. ``ts``: seconds since the epoch, the rank's clock."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(EventBatch)


def read_batch(payload: bytes) -> EventBatch:
    """Raises msgspec.DecodeError for anything that is not a batch of known events. After one of no time no restart
    could be told."""
    batch = decoded(_decoder, payload)
    if not math.isfinite(batch.ts):
        raise msgspec.DecodeError(f"a batch of time {batch.ts}")
    return batch


def read_number(number: bytes) -> int:
    """Of a batch; -1 ends a replay. Raises ValueError for anything else than eight bytes."""
    if len(number) != 8:
        raise ValueError(f"a number of {len(number)} bytes")
    return int.from_bytes(number, "big", signed=True)


class EventFeed:
    """What one rank holds, kept up to date by its numbered batches."""

    def __init__(self, blocks: RankBlocks | None = None) -> None:
        self.blocks = RankBlocks() if blocks is None else blocks
        self.next_seq: int | None = None
        self.num_holes = 0
        self.is_whole = False
        self._last_ts = 0.0

    def first_missing(self, seq: int, batch: EventBatch) -> int | None:
        """The number to ask for again before ``batch`` is applied; None when nothing is missing.

        A number that goes back, on a batch that is new, means that the rank has restarted: what it held is gone.
        """
        if self.next_seq is not None and seq < self.next_seq and batch.ts > self._last_ts:
            self.forget()
        expected = self.next_seq or 0
        return expected if seq > expected else None

    def has_hole_before(self, seq: int) -> bool:
        """Whether batches before this one have not come, behind others that have."""
        return self.next_seq is not None and seq > self.next_seq

    def apply(self, seq: int, batch: EventBatch) -> None:
        """Take note of a batch; one that was applied before (a replay overlaps what is sent live) is passed over."""
        if self.next_seq is None:
            self.is_whole = seq == 0
        elif seq < self.next_seq:
            return
        elif self.has_hole_before(seq):
            self.num_holes += 1
            self.is_whole = False
            self.blocks.clear()
        self.next_seq = seq + 1
        self._last_ts = batch.ts
        for event in batch.events:
            match event:
                case BlockStored():
                    self.blocks.stored(event.block_hashes, event.medium or POOL)
                case BlockRemoved():
                    self.blocks.removed(event.block_hashes, event.medium or POOL)
                case AllBlocksCleared():
                    self.blocks.clear()
                    self.is_whole = True

    def forget(self) -> None:
        """Start again: the rank has gone, or nothing is known of it any more."""
        self.blocks.clear()
        self.is_whole = False
        self.next_seq = None
        self._last_ts = 0.0
