# SPDX-License-Identifier: Apache-2.0
"""Calls over real HTTP, to a server of this process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from banyan.cli.engine import Engine, EngineError, plan_hints, policy_hints
from banyan.planner import Action, asked


@pytest.fixture
def served():
    """The address of a server, what it answers by path, and what was sent to it."""
    answers, sent = {}, []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body):
            sent.append((self.path, body))
            status, text = answers.get(self.path, (404, "no such path"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers, sent
    server.shutdown()
    thread.join()
    server.server_close()


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


def test_prefill_when_called_then_one_token_of_that_rank_is_asked_for(served):
    url, answers, sent = served
    answers["/generate"] = 200, '{"meta_info": {"id": "r"}}'
    assert Engine(url).prefill([5, 6], rank=1) == {"id": "r"}
    ((path, body),) = sent
    assert path == "/generate"
    assert "kv_hints" not in body
    assert (body["input_ids"], body["routed_dp_rank"], body["sampling_params"]["max_new_tokens"]) == ([5, 6], 1, 1)


def test_prefill_when_an_action_is_asked_for_then_the_request_carries_it(served):
    url, answers, sent = served
    answers["/generate"] = 200, '{"meta_info": {}}'
    Engine(url).prefill([5], rank=0, action=Action.COMPUTE)
    ((_, body),) = sent
    (hint,) = body["kv_hints"]["actions"]
    assert hint["action_type"] == asked.ACTION_TYPE
    assert asked.from_payload(hint["payload"]) is Action.COMPUTE


def test_generate_when_nothing_is_wished_for_then_the_server_chooses_and_the_whole_answer_comes_back(served):
    url, answers, sent = served
    answers["/generate"] = 200, '{"output_ids": [7], "meta_info": {}}'
    assert Engine(url).generate([5]) == {"output_ids": [7], "meta_info": {}}
    ((_, body),) = sent
    assert body.keys() == {"input_ids", "sampling_params"}


def test_generate_when_all_is_wished_for_then_the_request_says_so(served):
    url, answers, sent = served
    answers["/generate"] = 200, "{}"
    Engine(url).generate([5], rank=1, num_tokens=9, action=Action.MOVE, cache_salt="s")
    ((_, body),) = sent
    assert (body["routed_dp_rank"], body["sampling_params"]["max_new_tokens"], body["cache_salt"]) == (1, 9, "s")
    assert body["kv_hints"] == plan_hints(Action.MOVE)


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


def test_trace_level_when_set_then_asked_for_and_when_the_server_knows_none_then_said(served):
    url, answers, sent = served
    with pytest.raises(EngineError, match="HTTP 404"):
        Engine(url).set_trace_level(3)
    answers["/set_trace_level?level=3"] = 200, "success"
    Engine(url).set_trace_level(3)
    assert sent[-1] == ("/set_trace_level?level=3", None)


def test_policy_hints_when_they_are_sent_then_it_is_the_dispatchers_action():
    (action,) = policy_hints({"policy": "session_sticky"})["actions"]
    assert (action["action_type"], action["action_version"]) == ("banyan.policy", "1")
    assert action["payload"] == {"policy": "session_sticky"}


@pytest.mark.parametrize(
    ("answer", "said"), [((500, "out of memory"), "HTTP 500: out of memory"), ((200, "<"), "is the")]
)
def test_call_when_the_answer_is_none_then_it_is_said(served, answer, said):
    url, answers, _ = served
    answers["/server_info"] = answer
    with pytest.raises(EngineError, match=said):
        Engine(url).server_info()
