# SPDX-License-Identifier: Apache-2.0
"""Each token of a prompt is cached, or computed for one reason."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test.conftest import examples

from banyan.telemetry import Counters, Why, why_computed

PROMPT = {
    "prompt_tokens": 100,
    "cached_tokens": 0,
    "cacheable_tokens": 96,
    "found_tokens": 0,
    "planned_tokens": 0,
    "unplanned": Why.CHEAPER,
}


@pytest.mark.parametrize(
    ("case", "reasons"),
    [
        ({"asked_before_tokens": 0}, {Why.NEW: 96, Why.TAIL: 4}),
        ({"asked_before_tokens": 32}, {Why.GONE: 32, Why.NEW: 64, Why.TAIL: 4}),
        ({"asked_before_tokens": None}, {Why.ABSENT: 96, Why.TAIL: 4}),
        (
            {"asked_before_tokens": 80, "cached_tokens": 16, "found_tokens": 48},
            {Why.CHEAPER: 32, Why.GONE: 32, Why.NEW: 16, Why.TAIL: 4},
        ),
        ({"asked_before_tokens": 96, "cached_tokens": 96, "found_tokens": 96}, {Why.TAIL: 4}),
        # Of the same prompt a rank may hold more than was looked up.
        ({"asked_before_tokens": 16, "cached_tokens": 64, "found_tokens": 32}, {Why.NEW: 32, Why.TAIL: 4}),
        ({"asked_before_tokens": 0, "cached_tokens": 100}, {}),
        # What was to be moved did not come; the rest was to be computed in any case.
        (
            {"asked_before_tokens": 96, "cached_tokens": 16, "found_tokens": 96, "planned_tokens": 64},
            {Why.REFUSED: 48, Why.CHEAPER: 32, Why.TAIL: 4},
        ),
        (
            {"asked_before_tokens": 96, "cached_tokens": 80, "found_tokens": 96, "planned_tokens": 80}
            | {"prompt_tokens": 97, "unplanned": Why.TAIL},
            {Why.TAIL: 17},
        ),
    ],
)
def test_reasons_when_parts_of_a_prompt_were_found_then_the_others_have_one_each(case, reasons):
    assert why_computed(**{**PROMPT, **case}) == reasons


TOKENS = st.integers(0, 200)


@settings(max_examples=examples(300))
@given(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, st.none() | TOKENS, st.sampled_from(Why))
def test_reasons_when_figures_are_whatever_they_are_then_all_tokens_are_counted_once(
    prompt, cached, cacheable, found, planned, asked_before, unplanned
):
    cached, cacheable = min(cached, prompt), min(cacheable, prompt)
    reasons = why_computed(
        prompt_tokens=prompt,
        cached_tokens=cached,
        cacheable_tokens=cacheable,
        found_tokens=found,
        asked_before_tokens=asked_before,
        planned_tokens=planned,
        unplanned=unplanned,
    )
    assert sum(reasons.values()) + cached == prompt
    assert all(num_tokens > 0 for num_tokens in reasons.values())


def test_counters_when_reasons_are_counted_then_each_has_its_own():
    counters = Counters()
    for why in Why:
        counters.count_computed({why: 1})
    counted = counters.as_dict()
    assert [counted[f"computed_{why.value}_tokens"] for why in Why] == [1] * len(Why)
