# SPDX-License-Identifier: Apache-2.0
"""Page keys from tokens, against sha256 as SGLang chains it. SGLang's own hash is asked in test/sglang_plugin."""

from __future__ import annotations

import hashlib
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan._native import PageKeys, PromptTokens, RankTable

from .rig import Rank, frames

PAGE = 4
CHUNK_TOKENS = 32 * PAGE
UNBOUNDED = 1 << 30


def chained(tokens, prior=None):
    keys = []
    for first in range(0, len(tokens) - PAGE + 1, PAGE):
        words = tokens[first : first + PAGE]
        page = b"\xff" + struct.pack(f"<{PAGE}Q", *words) if max(words) >= 2**32 else struct.pack(f"<{PAGE}I", *words)
        prior = hashlib.sha256((prior or b"") + page).digest()
        keys.append(prior.hex())
    return keys


def buffer(tokens):
    return array("q", tokens)


def prompt(tokens, prior=None):
    return PromptTokens(prior, buffer(tokens), PAGE)


# Few values and shared beginnings, so that chunks come back, continue and crowd each other out. Some end in a token of
# more than 32 bits, and some differ in such bits only.
prompts = st.lists(st.sampled_from([0, 1, 2, 3, 1 << 40, 1 << 50 | 1]), max_size=3 * CHUNK_TOKENS) | st.builds(
    lambda length, last: [*range(length), last], st.integers(0, 3 * CHUNK_TOKENS), st.integers(0, 2**63 - 1)
)
priors = st.sampled_from([None, b"a" * 32])


@given(asked=st.lists(st.tuples(priors, prompts), max_size=6), num_chunks=st.sampled_from([1, 4, 64]))
def test_of_when_prompts_share_beginnings_then_every_answer_is_the_plain_chain(asked, num_chunks):
    page_keys = PageKeys(PAGE, num_chunks)
    for prior, tokens in asked:
        assert page_keys.of(prior, buffer(tokens)) == chained(tokens, prior)


@given(tokens=prompts, held=st.lists(st.integers(0, 4), min_size=2, max_size=2))
def test_prefix_lens_of_when_ranks_hold_parts_then_as_for_the_keys(tokens, held):
    rank_table = RankTable.create(2)
    ranks = [Rank(rank_table, slot) for slot in range(2)]
    page_keys = PageKeys(PAGE, 4)
    keys = chained(tokens)
    for rank, num_pages in zip(ranks, held, strict=True):
        rank.frame_table.publish(frames(*range(len(keys[:num_pages]))), keys[:num_pages])
    for _ in range(2):
        assert ranks[0].peers.prefix_lens_of(page_keys, prompt(tokens), UNBOUNDED) == ranks[0].peers.prefix_lens(keys)


def test_prefix_lens_of_when_a_prompt_is_longer_than_a_chunk_then_counted_to_its_end():
    rank_table = RankTable.create(2)
    rank = Rank(rank_table, 0, num_frames=80)
    tokens = list(range(80 * PAGE))
    rank.frame_table.publish(frames(*range(80)), chained(tokens))
    page_keys = PageKeys(PAGE, 4)
    assert rank.peers.prefix_lens_of(page_keys, prompt(tokens), UNBOUNDED) == [80, 0]
    assert rank.peers.prefix_lens_of(page_keys, prompt([*tokens[:260], 0]), UNBOUNDED) == [65, 0]
    assert rank.peers.prefix_lens_of(page_keys, prompt(tokens, prior=b"s" * 32), UNBOUNDED) == [0, 0]


def test_prefix_lens_of_when_much_is_new_then_it_hashes_a_bounded_part_at_a_time():
    rank_table = RankTable.create(2)
    rank = Rank(rank_table, 0, num_frames=100)
    tokens = prompt(range(100 * PAGE))
    rank.frame_table.publish(frames(*range(100)), chained(range(100 * PAGE)))
    page_keys = PageKeys(PAGE, 64)
    lens = [rank.peers.prefix_lens_of(page_keys, tokens, bound)[0] for bound in (31, 32, 32, 64, 0)]
    assert lens == [0, 32, 64, 100, 100], "what was hashed before is known and costs nothing of the bound"


def test_of_when_a_token_is_negative_then_refused():
    for make in (PageKeys(PAGE, 4).of, lambda prior, tokens: PromptTokens(prior, tokens, PAGE)):
        with pytest.raises(ValueError, match="negative"):
            make(None, buffer([1, 2**40, -1, 0]))


def test_prefix_fingerprint_when_prompts_differ_above_32_bits_only_then_they_part_there():
    row = prompt([*range(8), *[1 << 40] * 8]).prefix_fingerprint().row()
    row.appendleft(prompt([*range(8), *[1 << 40] * 8]).prefix_fingerprint())
    assert prompt([*range(8), *[1 << 41] * 8]).prefix_fingerprint().most_in_common(row) == 8
    assert prompt([*range(8), *[0] * 8]).prefix_fingerprint().most_in_common(row) == 8
    assert prompt([*range(8), *[1 << 40] * 8]).prefix_fingerprint().most_in_common(row) == 16


def test_of_when_the_arguments_cannot_be_right_then_refused():
    with pytest.raises(ValueError, match="int64"):
        PageKeys(PAGE, 4).of(None, array("i", range(8)))
    with pytest.raises(ValueError, match="32 bytes"):
        PageKeys(PAGE, 4).of(b"short", buffer(range(8)))
    with pytest.raises(ValueError, match="power of two"):
        PageKeys(PAGE, 3)
