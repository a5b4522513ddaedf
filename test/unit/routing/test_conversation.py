# SPDX-License-Identifier: Apache-2.0
"""What clients say by the way names their conversation."""

from __future__ import annotations

import pytest

from banyan.routing.conversation import NAME_BYTES, SESSION_HEADERS, conversation_of


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "one"},
        {"conversation": "one"},
        {"conversation": {"id": "one"}},
        {"metadata": {"session_id": "one"}},
        {"metadata": {"user_id": "one"}},
        {"metadata": {"user_id": "one" * 100_000}},
        {"prompt_cache_key": "\ud800"},
    ],
)
def test_conversation_when_a_body_names_it_then_it_has_a_short_name_of_its_own(fields):
    name = conversation_of(fields, {})
    assert name == conversation_of(fields, {}) != conversation_of({"prompt_cache_key": "other"}, {})
    assert len(name) == 2 * NAME_BYTES


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_conversation_when_a_header_names_it_then_that_comes_before_the_body(header):
    assert conversation_of({"prompt_cache_key": "other"}, {header: "one"}) == conversation_of({}, {header: "one"})


@pytest.mark.parametrize(
    "fields", [{}, {"prompt_cache_key": ""}, {"conversation": 5}, {"metadata": "x"}, {"metadata": {"user_id": None}}]
)
def test_conversation_when_nothing_names_it_then_it_has_no_name(fields):
    assert conversation_of(fields, {}) is None
