# SPDX-License-Identifier: Apache-2.0
"""The servers without an engine, and what is made of the times."""

import asyncio
import json
import time

import pytest

from banyan.router.description import Description, read_loads
from benchmark.router_overhead import PAGE_TOKENS, Standin, _added, _told


def asked(answer):
    return json.loads(asyncio.run(answer).body)


def test_standin_when_a_router_asks_then_it_answers_as_sglang_does() -> None:
    said = Description.read(asked(Standin(5557).server_info(None)), "http://127.0.0.1:1")
    assert said.block_tokens == PAGE_TOKENS
    assert [source.endpoint for source in said.sources] == ["tcp://127.0.0.1:5557"]
    assert list(read_loads(asked(Standin(5557).loads(None)), time.time())[0]) == [0]


def test_standin_when_it_tells_of_no_pages_then_the_router_expects_no_events() -> None:
    assert Description.read(asked(Standin(0).server_info(None)), "http://127.0.0.1:1").sources == ()


def test_times_when_the_router_takes_longer_then_the_difference_of_the_medians_is_told() -> None:
    taken = {"straight": [(1.0, 2.0), (3.0, 4.0), (2.0, 3.0)], "routed": [(4.0, 9.0), (2.0, 5.0), (3.0, 7.0)]}
    told = {way: _told(times) for way, times in taken.items()}
    assert _added(told) == {"added_first_byte_ms": pytest.approx(1.0), "added_last_byte_ms": pytest.approx(4.0)}
    assert told["routed"]["last_byte_ms"]["p50"] == 7.0 and told["routed"]["last_byte_ms"]["max"] == 9.0
