# SPDX-License-Identifier: Apache-2.0
"""Which KV heads a shard has, and which shards of another size have them: pure.

A size is that of an attention TP group. SGLang gives each of its shards as many neighbouring heads; where there are
more shards than heads, neighbouring shards have the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from banyan.layout import Namespace
from banyan.layout.page import KEYS, VALUES


def sizes(num_heads: int, most: int) -> list[int]:
    """The sizes up to ``most`` over which so many heads can be divided."""
    return [size for size in range(1, most + 1) if num_heads % size == 0 or size % num_heads == 0]


def heads_of(num_heads: int, size: int, shard: int) -> range:
    """The heads of a shard."""
    first = shard * num_heads // size
    return range(first, first + max(1, num_heads // size))


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring heads: which they are ``there``, among the ``num_theirs`` of a shard, and ``here``, among those that
    are wanted."""

    shard: int
    num_theirs: int
    there: slice
    here: slice


def pieces(num_heads: int, wanted: range, size: int) -> Iterator[Piece]:
    """Where shards of ``size`` have the heads ``wanted``, each once."""
    head = wanted.start
    while head < wanted.stop:
        shard = head * size // num_heads
        theirs = heads_of(num_heads, size, shard)
        end = min(theirs.stop, wanted.stop)
        there, here = (slice(head - first, end - first) for first in (theirs.start, wanted.start))
        yield Piece(shard, len(theirs), there, here)
        head = end


def rows_of(namespace: Namespace) -> int:
    """How many rows a part of a page has in each of which all heads lie side by side; 0 where its layers are not alike,
    or more than keys and values of heads."""
    (first, *others) = namespace.page
    is_plain = {name for name, _ in first} == {KEYS, VALUES} and all(layer == first for layer in others)
    if not is_plain or namespace.draft or namespace.window or namespace.attn_cp_size > 1:
        return 0
    return {"nhd": namespace.page_tokens, "hnd": 1}.get(namespace.pool_layout.rpartition("/")[2], 0)
