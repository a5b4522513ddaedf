# SPDX-License-Identifier: Apache-2.0
"""Prompts compared by their prefix fingerprints."""

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


def prefix_fingerprint(tokens, prior=None):
    return PromptTokens(prior, array("q", tokens), PAGE).prefix_fingerprint()


def row(*prefix_fingerprints):
    """Prefix fingerprints of which the last is the latest."""
    made = prefix_fingerprint([]).row()
    for one in prefix_fingerprints:
        made.appendleft(one)
    return made


def common_pages(one, other):
    num_tokens = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))  # noqa: B905
    return num_tokens // PAGE * PAGE


@given(asked=prompts, others=st.lists(prompts, max_size=4))
def test_most_in_common_when_there_are_many_then_whole_pages_of_the_longest(asked, others):
    most = max((common_pages(asked, other) for other in others), default=0)
    assert prefix_fingerprint(asked).most_in_common(row(*map(prefix_fingerprint, others))) == most


@given(asked=prompts, others=st.lists(prompts, max_size=4))
def test_oldest_in_common_when_several_begin_alike_then_the_place_of_the_first_that_came(asked, others):
    prefix_fingerprints = row(*map(prefix_fingerprint, others))
    for num_tokens in range(0, len(asked) + PAGE, PAGE):
        alike = [len(others) - 1 - n for n, other in enumerate(others) if common_pages(asked, other) >= num_tokens]
        assert prefix_fingerprint(asked).oldest_in_common(prefix_fingerprints, num_tokens) == (
            max(alike) if alike else None
        )


def test_most_in_common_when_chained_to_something_else_then_none():
    salted = prefix_fingerprint(range(8), b"s" * 32)
    assert (prefix_fingerprint(range(8)).most_in_common(row(salted)), salted.most_in_common(row(salted))) == (0, 8)


def test_row_when_the_oldest_is_dropped_then_it_counts_no_more_and_tells_its_length():
    asked, oldest, latest = prefix_fingerprint(range(100)), prefix_fingerprint(range(81)), prefix_fingerprint(range(40))
    prefix_fingerprints = row(oldest, latest)
    assert (asked.most_in_common(prefix_fingerprints), len(prefix_fingerprints)) == (80, 2)
    assert prefix_fingerprints.pop() == 80
    assert (asked.most_in_common(prefix_fingerprints), len(prefix_fingerprints)) == (40, 1)
    assert prefix_fingerprints.pop() == 40
    with pytest.raises(IndexError, match="empty"):
        prefix_fingerprints.pop()
    assert asked.most_in_common(prefix_fingerprints) == 0


def test_row_when_pages_have_another_size_then_refused():
    with pytest.raises(ValueError, match="page size"):
        row(PromptTokens(None, array("q", range(8)), 2 * PAGE).prefix_fingerprint())


@pytest.mark.parametrize("code", ["I", "i"])
def test_prompt_tokens_when_they_have_32_bits_then_taken_as_they_are_if_unsigned(code):
    tokens = array(code, range(100))
    if code == "I":
        assert (
            PromptTokens(None, tokens, PAGE).prefix_fingerprint().most_in_common(row(prefix_fingerprint(range(60))))
            == 60
        )
    else:
        with pytest.raises(ValueError, match="int64 or uint32"):
            PromptTokens(None, tokens, PAGE)


def test_prompt_tokens_when_the_arguments_cannot_be_right_then_refused():
    with pytest.raises(ValueError, match="negative"):
        prefix_fingerprint([-1])
    with pytest.raises(ValueError, match="at least one token"):
        PromptTokens(None, array("q", [1]), 0)
    with pytest.raises(ValueError, match="32 bytes"):
        prefix_fingerprint([1], b"short")
