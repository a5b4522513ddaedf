# SPDX-License-Identifier: Apache-2.0
"""A decode server keeps what is behind the prompts that it was handed."""

from banyan.features.pairs.answer_pages import Answers


def test_behind_when_a_prompt_was_handed_then_only_the_answer_is_left():
    answers = Answers()
    answers.handed(["a", "b", "c"])
    assert answers.behind(["b", "c", "d", "e"]) == ["d", "e"]
    assert answers.behind(["a", "b"]) == []


def test_behind_when_nothing_was_handed_then_all_is_its_own():
    assert Answers().behind(["x", "y"]) == ["x", "y"]


def test_behind_when_a_handed_page_follows_one_that_is_not_then_the_chain_stays_whole():
    answers = Answers()
    answers.handed(["c"])
    assert answers.behind(["a", "b", "c"]) == ["a", "b", "c"]


def test_handed_when_there_are_too_many_then_the_oldest_are_forgotten_and_the_repeated_stay():
    answers = Answers(max_remembered=3)
    answers.handed(["a", "b", "c"])
    answers.handed(["a"])
    answers.handed(["d"])
    assert answers.behind(["b"]) == ["b"]
    assert [answers.behind([key]) for key in "acd"] == [[], [], []]


def test_generated_when_there_are_too_many_then_the_oldest_are_not_written():
    answers = Answers(max_remembered=2)
    answers.generated(["a", "b", "c"])
    assert answers.take_generated(["a", "b", "c"]) == ["b", "c"]
