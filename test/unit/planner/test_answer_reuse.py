# SPDX-License-Identifier: Apache-2.0
"""Which answers' pages go first: conversations whose clients leave a model's thoughts out, and those that keep them."""

from __future__ import annotations

import pytest

from banyan.planner.answer_reuse import LEAST_JUDGED, MOST_JUDGED, MOST_PAGES, Answers


def pages(*names):
    return [f"page {name}" for name in names]


def turn(answers, number, *, is_continued, owner=None):
    """A prompt of two pages with an answer of two, and the prompt behind it; the answer's pages, and what is to go."""
    prompt, answer = pages(f"{number} system", f"{number} user"), pages(f"{number} thought", f"{number} said")
    answers.given(owner, prompt[-1], answer)
    following = answer if is_continued else pages(f"{number} said only")
    return answer, answers.asked(owner, [*prompt, *following, *pages(f"{number} next")])


def learn(answers, continued, owner=None):
    for number, is_continued in enumerate(continued):
        turn(answers, f"{owner} {number}", is_continued=is_continued, owner=owner)


def test_answers_when_prompts_leave_them_out_then_they_are_cold_once_that_is_known():
    answers = Answers()
    learn(answers, [False] * (LEAST_JUDGED - 1))
    left, first = turn(answers, "last to learn", is_continued=False)
    assert first == left == answers.cold(left)
    thought = pages("thought")
    answers.given(None, "an end", thought)
    assert answers.cold([*pages("prompt"), *thought]) == thought, "as soon as it is given"


def test_answers_when_too_little_is_known_then_none_is_cold():
    answers = Answers()
    learn(answers, [False] * (LEAST_JUDGED - 2))
    left, first = turn(answers, "left out", is_continued=False)
    assert first == answers.cold(left) == []


def test_answers_when_prompts_go_on_from_them_then_none_is_ever_cold():
    answers = Answers()
    for number in range(2 * MOST_JUDGED):
        answer, first = turn(answers, number, is_continued=True)
        assert first == answers.cold(answer) == []


@pytest.mark.parametrize(("num_continued", "is_cold"), [(3, True), (4, False)])
def test_answers_when_one_in_twenty_is_gone_on_from_then_they_are_cold_and_with_more_they_are_not(
    num_continued, is_cold
):
    answers = Answers()
    learn(answers, [True] * num_continued + [False] * (MOST_JUDGED - num_continued))
    answers.given(None, "an end", pages("thought"))
    assert bool(answers.cold(pages("thought"))) == is_cold


def test_answers_when_clients_begin_to_keep_them_then_they_are_cold_no_more():
    answers = Answers()
    learn(answers, [False] * MOST_JUDGED)
    for number in range(4):
        turn(answers, number, is_continued=True)
    answers.given(None, "an end", pages("thought"))
    assert answers.cold(pages("thought")) == []


def test_page_when_a_prompt_asks_for_it_then_it_is_cold_no_more():
    answers = Answers()
    learn(answers, [False] * MOST_JUDGED)
    answers.given(None, "an end", pages("thought", "said"))
    answers.asked(None, ["an end", *pages("thought", "next")])
    assert answers.cold(pages("thought", "said")) == pages("said")


def test_answers_when_one_tenant_leaves_them_out_then_those_of_another_stay():
    answers = Answers()
    learn(answers, [False] * MOST_JUDGED, owner="thinks")
    answers.given("keeps", "an end", pages("kept"))
    answers.given("thinks", "another end", pages("thought"))
    assert answers.cold(pages("kept", "thought")) == pages("thought")


def test_answer_when_its_prompt_is_only_asked_for_again_then_it_is_not_judged():
    answers = Answers()
    learn(answers, [False] * (LEAST_JUDGED - 1))
    answers.given(None, "an end", pages("thought"))
    assert answers.asked(None, [*pages("system"), "an end"]) == [] == answers.cold(pages("thought"))
    assert answers.asked(None, [*pages("system"), "an end", "something else"]) == pages("thought")


def test_answer_when_another_comes_behind_the_same_prompt_then_only_that_one_is_judged():
    answers = Answers()
    learn(answers, [False] * MOST_JUDGED)
    answers.given(None, "an end", pages("first"))
    answers.given(None, "an end", pages("second"))
    assert answers.asked(None, ["an end", *pages("second", "next")]) == []
    assert answers.cold(pages("second")) == []


def test_answers_when_the_weights_have_changed_then_what_owners_do_with_theirs_stays_known():
    answers = Answers()
    learn(answers, [False] * MOST_JUDGED)
    answers.given(None, "an end", pages("old"))
    answers.forget()
    assert answers.cold(pages("old")) == answers.asked(None, ["an end", "something else"]) == []
    answers.given(None, "an end", pages("new"))
    assert answers.cold(pages("new")) == pages("new")


def test_answers_when_they_are_many_then_the_oldest_are_forgotten():
    answers = Answers()
    learn(answers, [False] * MOST_JUDGED)
    answers.given(None, "an end", pages("old"))
    for number in range(4):
        answers.given(None, f"end {number}", [f"{number} {page}" for page in range(MOST_PAGES // 4)])
    assert answers.cold(pages("old")) == []
    assert answers.asked(None, ["an end", "something else"]) == [], "it is not known any more whose page came behind"
