# SPDX-License-Identifier: Apache-2.0
"""What a server is sent that is given prompts."""

from banyan.planner import Action, asked
from benchmark.engine import Engine, plan_hints, policy_hints


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


def test_policy_hints_when_they_are_sent_then_it_is_the_dispatchers_action():
    (action,) = policy_hints({"policy": "session_sticky"})["actions"]
    assert (action["action_type"], action["action_version"]) == ("banyan.policy", "1")
    assert action["payload"] == {"policy": "session_sticky"}
