# SPDX-License-Identifier: Apache-2.0
"""``kv_trans_for_dp``: copy pages from the pools of peers, or from the host arena, into one place.

The unit of work is an item: one chunk of one extent of one page. A program takes ``ITEMS`` of them at a time, so that
small pages keep as many bytes in flight as large ones, and goes on with stride ``num_programs``: the grid, and with it
the share of the GPU that a copy may take, does not depend on how much there is to copy. Where the chunks of a page lie
is read from a table: extents of different sizes have as many chunks as each needs.

Bytes are bytes: the type of the cache, its heads and its scales are extents with a page size. Each place has its own
address and stride for each extent, so that a pool (pages of one layer adjacent) and an arena (layers of one page
adjacent) differ in numbers only.
"""

from __future__ import annotations

import triton
import triton.language as tl

_DYNAMIC = [
    "places",
    "chunks",
    "rows",
    "sources",
    "targets",
    "target_row",
    "num_pages",
    "num_extents",
    "first_chunk",
    "num_chunks",
    "num_tiles",
]


# Compiled once, before the first request: no argument is worth another variant.
@triton.jit(do_not_specialize=_DYNAMIC)
def kv_trans_for_dp(
    places,  # address of int64 [num_places, 2, num_extents]: base address, stride in bytes
    chunks,  # address of int32 [all chunks of a page, 3]: extent, first word, number of words
    rows,  # address of int64 [num_pages]: the place that a page comes from
    sources,  # address of int64 [num_pages]: its number there
    targets,  # address of int64 [num_pages]: its number in the target place
    target_row,
    num_pages,
    num_extents,  # of a place
    first_chunk,  # of this launch
    num_chunks,  # of this launch, for each page
    num_tiles,
    ITEMS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT_BYTES: tl.constexpr,
):
    places = places.to(tl.pointer_type(tl.int64))
    chunks = chunks.to(tl.pointer_type(tl.int32))
    rows = rows.to(tl.pointer_type(tl.int64))
    sources = sources.to(tl.pointer_type(tl.int64))
    targets = targets.to(tl.pointer_type(tl.int64))
    num_items = num_pages * num_chunks
    lane = tl.arange(0, CHUNK_WORDS)

    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        item = tile * ITEMS + tl.arange(0, ITEMS)
        is_item = item < num_items
        page = item // num_chunks
        chunk = chunks + (first_chunk + item % num_chunks) * 3
        extent = tl.load(chunk, mask=is_item, other=0)
        first_word = tl.load(chunk + 1, mask=is_item, other=0)

        row = tl.load(rows + page, mask=is_item, other=0)
        source_page = tl.load(sources + page, mask=is_item, other=0)
        target_page = tl.load(targets + page, mask=is_item, other=0)
        source_place = places + row * 2 * num_extents + extent
        target_place = places + target_row * 2 * num_extents + extent
        source = tl.load(source_place, mask=is_item, other=0)
        source += source_page * tl.load(source_place + num_extents, mask=is_item, other=0)
        target = tl.load(target_place, mask=is_item, other=0)
        target += target_page * tl.load(target_place + num_extents, mask=is_item, other=0)

        source = (source + first_word * WORD_BYTES).to(tl.pointer_type(WORD))
        target = (target + first_word * WORD_BYTES).to(tl.pointer_type(WORD))
        # What the launch has checked and the compiler cannot see: it decides whether 16 bytes move at once.
        source = tl.multiple_of(source, ALIGNMENT_BYTES)
        target = tl.multiple_of(target, ALIGNMENT_BYTES)
        # Last: it need not live while addresses are made. A register more, and fewer programs share a processor.
        num_words = tl.load(chunk + 2, mask=is_item, other=0)
        num_words = tl.multiple_of(num_words, ALIGNMENT_BYTES // WORD_BYTES)

        mask = lane[None, :] < num_words[:, None]
        words = tl.load(source[:, None] + lane[None, :], mask=mask)
        tl.store(target[:, None] + lane[None, :], words, mask=mask)
