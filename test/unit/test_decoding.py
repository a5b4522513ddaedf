# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan.decoding import with_last_fields


@pytest.mark.parametrize(
    "body", [b"{}", b" { } ", b'{"a": 1}', b'\n{"a": {"b": [1, 2]}, "c": "}"} \r\n', b'{"n": 5, "n": null}']
)
def test_fields_when_they_are_added_then_they_count_and_the_others_are_as_they_were(body):
    assert json.loads(with_last_fields(body, {"n": 7, "m": "x"})) == json.loads(body) | {"n": 7, "m": "x"}


@pytest.mark.parametrize("body", [b"", b"[]", b'[{"a": 1}]', b'{"a": 1', b"null", b"x}", b"{", b"}"])
def test_body_when_it_is_no_object_then_it_stays_as_it_is(body):
    assert with_last_fields(body, {"n": 7}) == body
