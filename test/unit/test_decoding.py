# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan.decoding import printable, with_last_fields


@pytest.mark.parametrize(
    "body", [b"{}", b" { } ", b'{"a": 1}', b'\n{"a": {"b": [1, 2]}, "c": "}"} \r\n', b'{"n": 5, "n": null}']
)
def test_fields_when_they_are_added_then_they_count_and_the_others_are_as_they_were(body):
    assert json.loads(with_last_fields(body, {"n": 7, "m": "x"})) == json.loads(body) | {"n": 7, "m": "x"}


@pytest.mark.parametrize("body", [b"", b"[]", b'[{"a": 1}]', b'{"a": 1', b"null", b"x}", b"{", b"}"])
def test_body_when_it_is_no_object_then_it_stays_as_it_is(body):
    assert with_last_fields(body, {"n": 7}) == body


@pytest.mark.parametrize("char", ["\x1b", "\x07", "\r", "\n", "\x9b", "\u202e", "\ud800", "\x00"])
def test_text_when_a_terminal_would_take_it_for_a_command_then_a_blank_stands_there(char):
    assert printable(f"größer {char}[2J\N{SNOWMAN}") == "größer  [2J\N{SNOWMAN}"
    assert printable("größer") == "größer"
