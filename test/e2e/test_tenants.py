# SPDX-License-Identifier: Apache-2.0
"""The real engine with two ranks: what answers and /server_info say, to whom, and that the accounts are right."""

import json
import urllib.error

import pytest

from banyan.cli import explain
from benchmark.engine import Engine

pytestmark = pytest.mark.e2e
COUNTED = ("prompt_tokens", "own_tokens", "peer_tokens")


def ask(client, ids, rank, *, num_samples=1, **more):
    body = {**client.body(ids, num_tokens=4), "routed_dp_rank": rank, **more}
    body["sampling_params"]["n"] = num_samples
    return client.post("/generate", body)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_accounts_when_several_samples_are_asked_for_then_they_are_those_of_the_answers(banyan, prompt, num_prompts):
    prompts = [prompt(f"samples {num_prompts} {number}", 400) for number in range(num_prompts)]
    for ids in prompts:
        ask(banyan, ids, 0)
    before = [banyan.total(name) for name in COUNTED]
    answers = [answer["meta_info"] for ids in prompts for answer in ask(banyan, ids, 1, num_samples=4)]
    grown = [banyan.total(name) - old for name, old in zip(COUNTED, before, strict=True)]
    said = [answer["cached_tokens_details"] for answer in answers]
    assert grown == [
        sum(answer["prompt_tokens"] for answer in answers),
        sum(details["device"] for details in said),
        sum(details["peer"] for details in said),
    ]
    assert grown[0] == 4 * 400 * num_prompts


@pytest.mark.parametrize(("start", "cached"), [(16, 16), (320, 320), (639, 624)])
def test_details_when_logprobs_of_the_prompt_are_asked_for_then_a_rank_without_it_has_none_of_it(
    banyan, prompt, start, cached
):
    ids = prompt(f"logprobs {start}", 640)
    ask(banyan, ids, 0)
    meta = ask(banyan, ids, 1, return_logprob=True, logprob_start_len=start)["meta_info"]
    details = meta["cached_tokens_details"]
    assert (meta["cached_tokens"], details["peer"]) == (cached, cached)
    assert (details["dp_origin_kv_len"], details["dp_max_kv_len"]) == (0, cached)


def test_request_when_its_extra_key_could_be_an_adapter_then_400_and_the_server_goes_on(banyan, prompt):
    ids = prompt("adapter", 100)
    for path, body in (
        ("/generate", {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/completions", {"model": "any", "prompt": list(ids), "max_tokens": 1}),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            banyan.post(path, {**body, "extra_key": "banyan-adapter-" + "a" * 64})
        assert refused.value.code == 400
        banyan.post(path, {**body, "extra_key": "tenant 7"})


def test_server_info_when_a_prompt_was_asked_then_neither_its_id_nor_its_keys_are_there_and_its_owner_finds_it(
    banyan, prompt
):
    ids = prompt("pseudonyms", 400)
    ask(banyan, ids, 0)
    rid = ask(banyan, ids, 1)["meta_info"]["id"]
    assert rid not in json.dumps(banyan.ranks())
    (decision,) = explain.decisions(Engine(banyan.server.url), rid)
    assert decision["rid"] == rid and decision["prompt_tokens"] == 400
    told = [plan["rid"] for state in banyan.ranks().values() for plan in state["plans"]]
    assert rid not in told and told
    assert len({state["rid_nonce"] for state in banyan.ranks().values()}) == 1
