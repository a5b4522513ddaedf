# SPDX-License-Identifier: Apache-2.0
"""Block ids, as SGLang's KV events name pages, and what one rank holds of them.

A block id is the first 64 bits of the page key, signed (``hash_str_to_int64``), and a page key is the sha256 of the
key before it and the page's tokens as 32-bit little-endian integers. A page of a salted request has two: where it lies
in the pool SGLang's events name it by another chain, in Banyan's arena and store it is named by its key.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from banyan import _native
from banyan.layout import cacheable_tokens

SALT_TAG = b"sglang-cache-salt-v1\0"
"""Starts the chain of a salted request in events of the default format."""

KEY_TAG = b"sglang-cache-namespace-v1\0\1"
"""And that of its page keys, before the salt and its length: of no ``extra_key``, and a salt."""

POOL = "GPU"
"""Medium of a rank's pool, and of events that name none."""

ARENA = "CPU_PINNED"
"""Medium of the host arena: what a server lends to others."""

STORE = "DISK"
"""Medium of a server's store: what it reads by itself, and lends to nobody."""

STEP_PAGES = 1 << 10
"""Hashed at a time: no other thread runs meanwhile, for some 0.2 ms."""

MOST_IDS = 1 << 19
"""Blocks of one prompt that are compared: half a million tokens where each is a block."""

BITS = {POOL: 1, ARENA: 2, STORE: 4}
"""What says of a block that it is there. SGLang's fourth medium, a pool that many servers share, is no reason to prefer
one of them."""

ANY_MEDIUM = -1
"""The bits of all."""

MOST_BLOCKS = 1 << 23
"""Blocks of one rank that are known at most, wherever they are: no rank has so many, and a server that tells of more
is not to fill the router's memory."""

MOST_STORED = 1 << 20
"""Blocks of one rank's store that are known at most; each takes about 100 bytes of the router's memory."""


def pack(token_ids: object) -> array[int] | None:
    """Token ids as 32-bit integers; None for anything else."""
    try:
        return array("I", token_ids) if isinstance(token_ids, list) else None
    except (OverflowError, TypeError):
        return None


def salt_digests(cache_salt: str | None) -> tuple[bytes | None, ...]:
    """What the chains of a request's pages start from: in SGLang's events, and where it differs, that of their keys.
    An empty salt is none."""
    if not cache_salt:
        return (None,)
    salt = cache_salt.encode()
    starts = (SALT_TAG, KEY_TAG + len(salt).to_bytes(8, "little"))
    return tuple(hashlib.sha256(start + salt).digest() for start in starts)


def block_ids(token_ids: array[int], block_tokens: int, digest: bytes | None = None) -> array[int]:
    """Ids of the pages that a cache can supply, up to ``MOST_IDS``, of the chain that starts from ``digest``; none of a
    size that no page has: servers may say what they like."""
    # Python's integers would take six times as much, for as long as the request waits.
    ids = array("q")
    if not 0 < block_tokens < len(token_ids):
        return ids
    # To remember more than one chunk would save a third of the time, and keep the tokens of prompts.
    page_keys = _native.PageKeys(block_tokens, 1)
    num_tokens = min(cacheable_tokens(len(token_ids), block_tokens), MOST_IDS * block_tokens)
    step = STEP_PAGES * block_tokens
    for start in range(0, num_tokens, step):
        keys = page_keys.of(digest, token_ids[start : min(start + step, num_tokens)])
        ids.extend(struct.unpack(f">{len(keys)}q", bytes.fromhex("".join(key[:16] for key in keys))))
        digest = bytes.fromhex(keys[-1])
    return ids


class RankBlocks:
    """The blocks of one rank, in the media that are its own. Of its store, what was told first, up to ``most_stored``,
    and of all up to ``most_blocks``: too little known costs a hit."""

    def __init__(self, most_stored: int = MOST_STORED, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_stored = most_stored
        self._most_blocks = most_blocks
        self._media: dict[int, int] = {}
        self._nums: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._media)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._media

    def run(self, ids: Sequence[int], start: int, bits: int) -> int:
        """The place of the first block from ``start`` on that is in none of these media."""
        get = self._media.get
        for place in range(start, len(ids)):
            if not get(ids[place], 0) & bits:
                return place
        return len(ids)

    def num_in(self, medium: str) -> int:
        """How many are in this medium."""
        return self._nums.get(medium, 0)

    def stored(self, ids: Iterable[int], medium: str) -> None:
        if medium not in BITS:
            return
        bit = BITS[medium]
        num = self._nums.get(medium, 0)
        for block_id in ids:
            bits = self._media.get(block_id, 0)
            if bits & bit:
                continue
            if medium == STORE and num >= self._most_stored:
                break
            if not bits and len(self._media) >= self._most_blocks:
                continue
            self._media[block_id] = bits | bit
            num += 1
        self._nums[medium] = num

    def removed(self, ids: Iterable[int], medium: str) -> None:
        bit = BITS.get(medium, 0)
        for block_id in ids:
            bits = self._media.get(block_id, 0)
            if not bits & bit:
                continue
            self._nums[medium] -= 1
            if bits == bit:
                del self._media[block_id]
            else:
                self._media[block_id] = bits & ~bit

    def clear(self) -> None:
        self._media.clear()
        self._nums.clear()


Holder = Sequence[tuple[RankBlocks, int]]
"""Who holds a block if one of these ranks has it, in one of the media of these bits."""


def held_by(ranks: Sequence[RankBlocks], others: Sequence[RankBlocks] = ()) -> Holder:
    """What the ranks of one server need not compute: what any of them holds, and what ``others`` have written to the
    store that is theirs too."""
    return [*((rank, ANY_MEDIUM) for rank in ranks), *((rank, BITS[STORE]) for rank in others)]


def held_in_memory(ranks: Sequence[RankBlocks]) -> Holder:
    """What the ranks of one server hold above their store."""
    return [(rank, ~BITS[STORE]) for rank in ranks]


def held_in_arena(ranks: Sequence[RankBlocks]) -> Holder:
    """What all ranks of a server hold in its arena."""
    return [(rank, BITS[ARENA]) for rank in ranks]


def leading_blocks(names: Sequence[Sequence[int]], holder: Holder) -> int:
    """How many leading blocks it holds, each by any of its ``names``: a list of ids for each chain. A rank that has one
    mostly has the next, too, and is asked until it has not."""
    num_blocks, num_before = 0, -1
    while num_before < num_blocks:
        num_before = num_blocks
        for ids in names:
            for rank, bits in holder:
                num_blocks = rank.run(ids, num_blocks, bits)
    return num_blocks
