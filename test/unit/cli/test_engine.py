# SPDX-License-Identifier: Apache-2.0
"""Calls over real HTTP, to a server of this process."""

import json

import pytest

from banyan.cli import engine
from banyan.cli.engine import Engine, EngineError


def test_ranks_when_the_server_shares_then_each_ranks_state(served):
    url, answers, _ = served
    states = [{"banyan": {"dp_rank": rank}} for rank in (1, 0)]
    answers["/server_info"] = 200, json.dumps({"internal_states": states})
    assert Engine(url + "/").ranks() == {0: {"dp_rank": 0}, 1: {"dp_rank": 1}}


def test_ranks_when_the_server_does_not_share_then_the_flag_is_named(served):
    url, answers, _ = served
    answers["/server_info"] = 200, json.dumps({"internal_states": [{}]})
    with pytest.raises(EngineError, match="--enable-banyan"):
        Engine(url).ranks()


def test_model_when_asked_for_then_as_the_server_serves_it(served):
    url, answers, _ = served
    answers["/model_info"] = 200, json.dumps({"served_model_name": "org/m:8b"})
    assert Engine(url).served_model() == "org/m:8b"


@pytest.mark.parametrize("url", ["myhost", "", "localhost:30000", "http://[::1"])
def test_call_when_the_address_is_none_then_it_is_said(url):
    with pytest.raises(EngineError, match="is this its address"):
        Engine(url).ranks()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, "out of memory"), "HTTP 500: out of memory"),
        ((500, "out\x1b[2J\nof memory"), r"HTTP 500: out \[2J of memory"),
        ((200, "<"), "is the"),
        ((200, '{"up_s": Infinity}'), "is the"),
        ((200, "[]"), "no object: is the"),
        ((200, "null"), "no object: is the"),
    ],
)
def test_call_when_the_answer_is_none_then_it_is_said(served, answer, said):
    url, answers, _ = served
    answers["/server_info"] = answer
    with pytest.raises(EngineError, match=said):
        Engine(url).server_info()


def test_call_when_more_comes_than_a_server_tells_then_it_is_not_read_on(served, monkeypatch):
    url, answers, _ = served
    monkeypatch.setattr(engine, "MOST_ANSWER_BYTES", 20)
    answers["/server_info"] = 200, json.dumps({"internal_states": 20 * [{}]})
    with pytest.raises(EngineError, match="more than 20 bytes came"):
        Engine(url).server_info()
