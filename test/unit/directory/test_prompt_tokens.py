# SPDX-License-Identifier: Apache-2.0
"""Prompts compared by their trails."""

from __future__ import annotations

from array import array
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan._native import PromptTokens

PAGE = 4

# Few values and long shared beginnings: common parts end within pages, at their ends, and where a prompt ends.
prompts = st.builds(
    lambda length, rest: [*range(length), *rest], st.integers(0, 2_100), st.lists(st.integers(0, 2), max_size=9)
)


def trail(tokens, prior=None):
    return PromptTokens(prior, array("q", tokens), PAGE).trail()


def common_pages(one, other):
    num_tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))  # noqa: B905
    return num_tokens // PAGE * PAGE


@given(asked=prompts, others=st.lists(prompts, max_size=4))
def test_most_in_common_when_there_are_many_then_whole_pages_of_the_longest(asked, others):
    most = max((common_pages(asked, other) for other in others), default=0)
    assert trail(asked).most_in_common([trail(other) for other in others]) == most


def test_most_in_common_when_chained_to_something_else_then_none():
    salted = trail(range(8), b"s" * 32)
    assert (trail(range(8)).most_in_common([salted]), salted.most_in_common([salted])) == (0, 8)


def test_prompt_tokens_when_the_arguments_cannot_be_right_then_refused():
    with pytest.raises(ValueError, match="32 bits"):
        trail([2**32])
    with pytest.raises(ValueError, match="at least one token"):
        PromptTokens(None, array("q", [1]), 0)
    with pytest.raises(ValueError, match="32 bytes"):
        trail([1], b"short")
