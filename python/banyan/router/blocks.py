# SPDX-License-Identifier: Apache-2.0
"""Block ids, as SGLang's KV events name pages, and what one rank holds of them.

A block id is the first 64 bits of the page key, signed (``hash_str_to_int64``), and a page key is the sha256 of the
key before it and the page's tokens as 32-bit little-endian integers.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

from banyan.layout import cacheable_tokens

SALT_TAG = b"sglang-cache-salt-v1\0"
"""Starts the chain of a salted request in events of the default format."""

NOT_ON_THE_RANK = "EXTERNAL"
"""Medium of a pool that many servers share: no reason to prefer one of them."""


def pack(token_ids: object) -> array[int] | None:
    """Token ids as 32-bit integers; None for anything else."""
    try:
        return array("I", token_ids) if isinstance(token_ids, list) else None
    except (OverflowError, TypeError):
        return None


def salt_digest(cache_salt: str | None) -> bytes | None:
    """What the chain of a salted request starts from."""
    return None if cache_salt is None else hashlib.sha256(SALT_TAG + cache_salt.encode()).digest()


def block_ids(token_ids: array[int], block_tokens: int, cache_salt: str | None = None) -> Iterator[int]:
    """Ids of the pages that a cache can supply, hashed as they are asked for: what nobody holds costs one hash."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    num_bytes = 4 * cacheable_tokens(len(token_ids), block_tokens)
    return _chain(memoryview(packed.tobytes())[:num_bytes], 4 * block_tokens, salt_digest(cache_salt) or b"")


def _chain(packed: memoryview, block_bytes: int, digest: bytes) -> Iterator[int]:
    for start in range(0, len(packed), block_bytes):
        page = hashlib.sha256(digest)
        page.update(packed[start : start + block_bytes])
        digest = page.digest()
        yield int.from_bytes(digest[:8], "big", signed=True)


class RankBlocks:
    """The blocks of one rank, in any medium that is its own."""

    def __init__(self) -> None:
        self._media: dict[int, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._media)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._media

    def stored(self, ids: Iterable[int], medium: str) -> None:
        if medium == NOT_ON_THE_RANK:
            return
        added = frozenset((medium,))
        for block_id in ids:
            self._media[block_id] = self._media.get(block_id, frozenset()) | added

    def removed(self, ids: Iterable[int], medium: str) -> None:
        gone = frozenset((medium,))
        for block_id in ids:
            left = self._media.get(block_id, frozenset()) - gone
            if left:
                self._media[block_id] = left
            else:
                self._media.pop(block_id, None)

    def clear(self) -> None:
        self._media.clear()


def leading_blocks(ids: Iterator[int], ranks: Sequence[RankBlocks]) -> list[int]:
    """How many leading blocks each rank holds; ``ids`` is read only as far as somebody holds them."""
    found = [0] * len(ranks)
    searching = list(range(len(ranks)))
    for num_before, block_id in enumerate(ids):
        searching = [index for index in searching if block_id in ranks[index]]
        if not searching:
            break
        for index in searching:
            found[index] = num_before + 1
    return found
