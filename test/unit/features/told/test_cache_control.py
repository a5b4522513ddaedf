# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.features.told.cache_control import ttl_s_of

FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    "fields, ttl_s",
    [
        ({}, None),
        ({"system": "text", "messages": [{"role": "user", "content": "text"}]}, None),
        ({"system": [{"type": "text", "text": "x", "cache_control": FIVE}]}, 300.0),
        ({"tools": [{"name": "t", "cache_control": HOUR}]}, 3600.0),
        ({"messages": [{"content": [{"cache_control": FIVE}, {"cache_control": HOUR}]}]}, 3600.0),
        ({"messages": [{"content": [{"type": "tool_result", "content": [{"cache_control": HOUR}]}]}]}, 3600.0),
        ({"messages": [{"content": [{"type": "tool_result", "content": "text"}, {"content": [None]}]}]}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "1y"}}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": ["1h"]}}, None),
        (
            {"cache_control": {"type": "other"}, "system": 5, "tools": {"a": 1}, "messages": [None, {"content": [3]}]},
            None,
        ),
        ({"cache_control": "ephemeral", "messages": "text"}, None),
    ],
)
def test_ttl_when_a_request_names_some_or_none_then_the_longest_and_nothing_malformed(fields, ttl_s):
    assert ttl_s_of(fields) == ttl_s
