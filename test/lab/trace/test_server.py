# SPDX-License-Identifier: Apache-2.0
"""Calls over real HTTP, to a server of this process."""

import pytest

from banyan.cli.engine import EngineError
from banyan_lab.trace.server import TracingServer


def test_stream_when_an_answer_comes_in_pieces_then_each_is_told(served):
    url, answers, sent = served
    answers["/generate"] = 200, 'data: {"text": "a"}\n\ndata: {"text": "ab"}\n\ndata: [DONE]\n\n'
    assert [piece["text"] for piece in TracingServer(url).stream({"text": "x"}, {"traceparent": "t"})] == ["a", "ab"]
    ((_, body),) = sent
    assert body == {"text": "x", "stream": True}


def test_stream_when_the_server_gives_up_in_the_middle_then_said(served):
    url, answers, _ = served
    answers["/generate"] = 200, 'data: {"text": "a"}\n\ndata: {"error": {"message": "no memory"}}\n\n'
    pieces = TracingServer(url).stream({"text": "x"}, {})
    assert next(pieces) == {"text": "a"}
    with pytest.raises(EngineError, match="no memory"):
        next(pieces)


def test_trace_level_when_set_then_asked_for_and_when_the_server_knows_none_then_said(served):
    url, answers, sent = served
    with pytest.raises(EngineError, match="HTTP 404"):
        TracingServer(url).set_trace_level(3)
    answers["/set_trace_level?level=3"] = 200, "success"
    TracingServer(url).set_trace_level(3)
    assert sent[-1] == ("/set_trace_level?level=3", None)
