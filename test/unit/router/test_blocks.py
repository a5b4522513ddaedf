# SPDX-License-Identifier: Apache-2.0
"""Names of pages, and who holds how many of them from the front."""

from __future__ import annotations

import hashlib
import tracemalloc
from array import array
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.router import blocks
from banyan.router.blocks import (
    ARENA,
    BITS,
    STEP_PAGES,
    STORE,
    RankBlocks,
    block_ids,
    held_by,
    held_in_arena,
    held_in_memory,
    leading_blocks,
    pack,
    salt_digests,
)

TOKENS = array("I", range(1, 18))


def is_in(blocks, block_id, medium):
    return blocks.run([block_id], 0, BITS[medium]) == 1


@pytest.mark.parametrize("prior", [*salt_digests(None), *salt_digests("a")], ids=["none", "events", "keys"])
def test_ids_when_computed_then_the_first_bits_of_the_chained_sha256(prior):
    tokens, digest, expected = array("I", range((STEP_PAGES + 40) * 4 + 1)), prior or b"", []
    for start in range(0, len(tokens) - 4, 4):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 4])
        digest = hashlib.sha256(digest + page).digest()
        expected.append(int.from_bytes(digest[:8], "big", signed=True))
    assert list(block_ids(tokens, 4, prior)) == expected


@pytest.mark.parametrize("block_tokens", [-16, 0, 1 << 100])
def test_ids_when_a_server_names_a_size_that_no_block_has_then_none(block_tokens):
    assert not block_ids(TOKENS, block_tokens)


def test_ids_when_a_prompt_has_many_then_each_takes_eight_bytes_and_not_what_an_integer_of_python_does():
    tokens = array("I", [7]) * 40_000
    tracemalloc.start()
    ids = block_ids(tokens, 1)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids) == 39_999 and kept < 12 * len(ids)


def test_ids_when_the_last_page_is_just_full_then_its_last_token_keeps_it_out():
    assert [len(block_ids(TOKENS[:num], 4)) for num in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_ids_when_salted_then_no_page_is_shared():
    chains = [digest for salt in ("", "a", "b") for digest in salt_digests(salt)]
    assert len({block_id for digest in chains for block_id in block_ids(TOKENS, 4, digest)}) == 4 * len(chains) == 20


def test_pack_when_it_is_no_list_of_tokens_then_none():
    assert pack([1, 2]) == array("I", [1, 2])
    assert [pack(value) for value in ([-1], [1 << 32], [1.5], "12", None, [[1]])] == [None] * 6


def test_leading_when_ranks_hold_different_lengths_then_each_its_own():
    ranks = [RankBlocks() for _ in range(3)]
    ranks[0].stored([1, 2, 4], "GPU")
    ranks[1].stored([1, 2, 3, 4], "GPU")
    assert [leading_blocks([[1, 2, 3, 9, 4]], held_by([rank])) for rank in ranks] == [2, 3, 0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["GPU", ARENA, STORE]), st.integers(0, 7)), max_size=40),
    st.lists(st.integers(0, 7), max_size=12),
)
def test_leading_when_ranks_hold_anything_in_any_medium_then_all_up_to_the_first_that_nobody_holds(told, ids):
    ranks = [RankBlocks() for _ in range(4)]
    for rank, medium, block in told:
        ranks[rank].stored([block], medium)
    own, others = ranks[:3], ranks[3:]
    media = {
        block: {medium for rank in own for medium in ("GPU", ARENA, STORE) if is_in(rank, block, medium)}
        for block in ids
    }

    def num_leading(is_held):
        return sum(1 for _ in takewhile(is_held, ids))

    assert leading_blocks([ids], held_by(own)) == num_leading(lambda block: media[block])
    assert leading_blocks([ids], held_in_arena(own)) == num_leading(lambda block: ARENA in media[block])
    assert leading_blocks([ids], held_in_memory(own)) == num_leading(lambda block: media[block] - {STORE})
    shared = num_leading(lambda block: media[block] or is_in(others[0], block, STORE))
    assert leading_blocks([ids], held_by(own, others)) == shared


def test_leading_when_a_rank_holds_many_then_each_is_looked_for_once_and_not_at_every_rank():
    ids, asked = list(range(1000)), [0]

    class Counting(dict):
        def get(self, *what):
            asked[0] += 1
            return super().get(*what)

    ranks = [RankBlocks() for _ in range(8)]
    for rank in ranks:
        rank._media = Counting()
    ranks[7].stored(ids, "GPU")
    asked[0] = 0
    assert leading_blocks([ids], held_by(ranks)) == 1000 and asked[0] < 1020


def test_ids_when_a_prompt_has_more_blocks_than_are_compared_then_those_of_its_beginning(monkeypatch):
    whole = block_ids(TOKENS, 2)
    monkeypatch.setattr(blocks, "MOST_IDS", 3)
    assert block_ids(TOKENS, 2) == whole[:3] and len(whole) == 8


def test_blocks_when_removed_from_one_medium_then_the_other_still_holds_them():
    blocks = RankBlocks()
    blocks.stored([1], "GPU")
    blocks.stored([1], "CPU_PINNED")
    blocks.stored([2], "EXTERNAL")
    assert is_in(blocks, 1, ARENA) and is_in(blocks, 1, "GPU") and not is_in(blocks, 2, "GPU")
    blocks.removed([1, 7], "GPU")
    assert 1 in blocks and 2 not in blocks
    assert is_in(blocks, 1, ARENA) and not is_in(blocks, 1, "GPU") and not is_in(blocks, 1, "DISK")
    blocks.removed([1], "CPU_PINNED")
    assert not len(blocks)


def test_blocks_when_a_store_has_more_than_are_remembered_then_the_first_of_them_and_room_is_used_again():
    blocks = RankBlocks(most_stored=2)
    blocks.stored([1], "GPU")
    blocks.stored([1, 1, 2, 3], STORE)
    assert blocks.num_in(STORE) == 2 and 3 not in blocks
    blocks.removed([2, 2, 9], STORE)
    blocks.stored([3], STORE)
    blocks.stored([4], "GPU")
    assert blocks.num_in(STORE) == 2 and 3 in blocks and 2 not in blocks and blocks.num_in("GPU") == 2
    blocks.clear()
    assert len(blocks) == blocks.num_in(STORE) == 0


def test_blocks_when_they_are_in_a_store_then_no_memory_holds_them():
    first, second = RankBlocks(), RankBlocks()
    first.stored([1, 2], STORE)
    first.stored([2], ARENA)
    second.stored([3], "GPU")
    memory = held_in_memory([first, second])
    assert [leading_blocks([[block_id]], memory) for block_id in (1, 2, 3, 4)] == [0, 1, 1, 0]


def test_blocks_when_ranks_and_others_with_the_same_store_hold_them_then_the_server_need_not_compute_them():
    own, peer, other = RankBlocks(), RankBlocks(), RankBlocks()
    own.stored([1], "GPU")
    peer.stored([2], ARENA)
    other.stored([3], STORE)
    other.stored([4], "GPU")
    server = held_by([own, peer], [other])
    assert [leading_blocks([[block_id]], server) for block_id in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert [leading_blocks([[1, 2, 3, 4]], one) for one in (server, held_by([own]))] == [3, 1]


def test_leading_when_blocks_have_two_names_then_each_counts_by_any_of_them():
    """Of a salted prompt, what lies in the pool has another name than what lies in arena and store."""
    rank = RankBlocks()
    rank.stored([11, 13], "GPU")
    rank.stored([22], ARENA)
    rank.stored([24], STORE)
    names = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]]
    assert leading_blocks(names, held_by([rank])) == 4
    assert leading_blocks(names, held_in_memory([rank])) == 3
    assert leading_blocks(names, held_in_arena([rank])) == 0
