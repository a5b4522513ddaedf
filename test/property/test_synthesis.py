# SPDX-License-Identifier: Apache-2.0
"""Synthesised prompts share exactly what their blocks share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_lab.replay import Synthesis, TraceRequest, Vocabulary
from banyan_lab.replay.trace import runs_of

BLOCK = 8
VOCABULARY = Vocabulary(1_000, 48_999)


@st.composite
def requests(draw) -> TraceRequest:
    blocks = draw(st.lists(st.integers(0, 3), max_size=5))
    session = draw(st.sampled_from("ab"))
    num_tokens = draw(st.integers(1, 6 * BLOCK))
    return TraceRequest(
        session, draw(st.integers(0, 1)), 0.0, num_tokens, 1, runs_of(blocks), draw(st.sampled_from("xy"))
    )


def num_leading(first, second):
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@given(one=requests(), other=requests(), seed=st.integers(0, 5))
def test_prompts_when_blocks_are_equal_then_so_are_tokens_and_only_then(one, other, seed):
    synthesis = Synthesis(VOCABULARY, block_tokens=BLOCK, seed=seed)
    prompts = [synthesis.prompt(request) for request in (one, other)]
    assert [len(prompt) for prompt in prompts] == [one.num_input_tokens, other.num_input_tokens]
    assert all(VOCABULARY.first <= token <= VOCABULARY.last for prompt in prompts for token in prompt)
    same_blocks = num_leading(list(one.block_ids()), list(other.block_ids())) if one.scope == other.scope else 0
    covered = min(same_blocks * BLOCK, one.num_input_tokens, other.num_input_tokens)
    shared = num_leading(*prompts)
    assert shared >= covered
    if (one.session, one.turn) != (other.session, other.turn):
        # Beyond the common blocks a token is equal by chance only; eight in a row are not.
        assert shared < covered + BLOCK or shared == min(map(len, prompts)) < covered + BLOCK


@given(request=requests())
def test_prompts_when_made_again_elsewhere_then_the_same(request):
    first, second = (Synthesis(VOCABULARY, block_tokens=BLOCK, seed=1) for _ in range(2))
    assert first.prompt(request) == second.prompt(request)


def test_vocabulary_when_empty_then_refused():
    with pytest.raises(ValueError, match="empty"):
        Vocabulary(5, 5)
