# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.telemetry import NodeReuse, PromptAnswer

PAGE = 16


def pages(*numbers):
    return b"".join((number << 1).to_bytes(8, "little") for number in numbers)


class Rank:
    def __init__(self):
        self.now_s = 0.0
        self.reuse = NodeReuse(PAGE, 100, 7, lambda: self.now_s)

    def told(self):
        """Long enough after the last count."""
        self.now_s += 10.0
        return self.reuse.figures(lambda times: 2 * times)


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.lists(st.integers(1, 2**63 - 1)))
def test_answered_when_it_is_told_and_heard_then_it_is_the_same(num_tokens, num_pages, numbers):
    one = PromptAnswer(num_tokens, num_pages, pages(*numbers))
    assert PromptAnswer.of(one.message()) == one


@given(st.lists(st.integers(1, 2**63 - 1), max_size=8))
def test_answered_when_a_prompt_has_come_then_it_is_none(numbers):
    assert PromptAnswer.of(pages(*numbers)) is None


def test_figures_when_a_page_was_computed_twice_then_once_it_could_have_been_found():
    rank = Rank()
    for _ in range(2):
        rank.reuse.asked(pages(1, 2))
        rank.reuse.answered(PromptAnswer(40, 2, pages(1, 2)))
    told = rank.told()
    assert told["hit_ceiling_24h"] == pytest.approx(32 / 80, abs=0.001)
    assert told["heard_tokens_15m"] == told["heard_tokens_24h"] == 80


def test_figures_when_the_cache_had_held_half_then_less_would_have_been_found():
    rank = Rank()
    for _ in range(10):
        rank.reuse.asked(pages(1, 2))
        rank.reuse.answered(PromptAnswer(32, 2, b""))
    told = rank.told()
    assert [told[f"hit_share_{word}"] for word in ("half", "same", "double")] == pytest.approx([0.45, 0.9, 0.9])


def test_figures_when_an_answer_is_in_the_next_prompt_then_it_counts_as_found():
    rank = Rank()
    rank.reuse.asked(pages(1))
    rank.reuse.came(pages(1, 2))
    rank.reuse.asked(pages(1, 2))
    rank.reuse.answered(PromptAnswer(48, 3, pages(1)))
    assert rank.told()["hit_share_same"] == pytest.approx(2 / 3, abs=0.001)


def test_figures_when_nothing_was_answered_then_they_are_zero_and_counted_again_only_later():
    rank = Rank()
    assert set(rank.told().values()) == {0.0}
    rank.reuse.answered(PromptAnswer(16, 1, b""))
    assert set(rank.reuse.figures(lambda times: 1.0).values()) == {0.0}
    assert rank.reuse.count(lambda times: 1.0)["hit_ceiling_15m"] == 1.0, "who asks for the state wants it as it is"
