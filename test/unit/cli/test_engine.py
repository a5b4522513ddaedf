# SPDX-License-Identifier: Apache-2.0
"""Calls over real HTTP, to a server of this process."""

import json

import pytest

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


def test_stream_when_an_answer_comes_in_pieces_then_each_is_told(served):
    url, answers, sent = served
    answers["/generate"] = 200, 'data: {"text": "a"}\n\ndata: {"text": "ab"}\n\ndata: [DONE]\n\n'
    assert [piece["text"] for piece in Engine(url).stream({"text": "x"}, {"traceparent": "t"})] == ["a", "ab"]
    ((_, body),) = sent
    assert body == {"text": "x", "stream": True}


def test_stream_when_the_server_gives_up_in_the_middle_then_said(served):
    url, answers, _ = served
    answers["/generate"] = 200, 'data: {"text": "a"}\n\ndata: {"error": {"message": "no memory"}}\n\n'
    pieces = Engine(url).stream({"text": "x"}, {})
    assert next(pieces) == {"text": "a"}
    with pytest.raises(EngineError, match="no memory"):
        next(pieces)


def test_model_when_asked_for_then_as_the_server_serves_it(served):
    url, answers, _ = served
    answers["/model_info"] = 200, json.dumps({"served_model_name": "org/m:8b"})
    assert Engine(url).served_model() == "org/m:8b"


@pytest.mark.parametrize("url", ["myhost", "", "localhost:30000", "http://[::1"])
def test_call_when_the_address_is_none_then_it_is_said(url):
    with pytest.raises(EngineError, match="is this its address"):
        Engine(url).ranks()


def test_trace_level_when_set_then_asked_for_and_when_the_server_knows_none_then_said(served):
    url, answers, sent = served
    with pytest.raises(EngineError, match="HTTP 404"):
        Engine(url).set_trace_level(3)
    answers["/set_trace_level?level=3"] = 200, "success"
    Engine(url).set_trace_level(3)
    assert sent[-1] == ("/set_trace_level?level=3", None)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, "out of memory"), "HTTP 500: out of memory"),
        ((500, "out\x1b[2J\nof memory"), r"HTTP 500: out \[2J of memory"),
        ((200, "<"), "is the"),
        ((200, '{"up_s": Infinity}'), "is the"),
    ],
)
def test_call_when_the_answer_is_none_then_it_is_said(served, answer, said):
    url, answers, _ = served
    answers["/server_info"] = answer
    with pytest.raises(EngineError, match=said):
        Engine(url).server_info()
