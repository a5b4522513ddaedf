# SPDX-License-Identifier: Apache-2.0
"""Who gets a request, on real ranks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.e2e


def placed(banyan, reason):
    return {rank: state[f"placed_{reason}"] for rank, state in banyan.ranks().items()}


def test_dispatch_when_a_rank_holds_the_prefix_then_it_gets_the_request(banyan, prompt):
    for number in range(4):
        ids = prompt(f"dispatch{number}", 300)
        _, first = banyan.generate(ids, num_tokens=1)
        before = placed(banyan, "cache")[first["dp_rank"]]
        _, again = banyan.generate([*ids, 5], num_tokens=1)
        assert again["dp_rank"] == first["dp_rank"]
        assert again["cached_tokens"] == 288
        assert again["cached_tokens_details"]["peer"] == 0
        assert placed(banyan, "cache")[first["dp_rank"]] == before + 1


def test_dispatch_when_the_client_names_a_policy_then_it_is_followed(banyan, prompt):
    action = {
        "action_id": "a",
        "action_type": "banyan.policy",
        "action_version": "1",
        "payload": {"policy": "round_robin"},
    }
    body = {
        "input_ids": prompt("turns", 64),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "kv_hints": {"protocol_version": "1", "message_id": "m", "actions": [action]},
    }
    ranks = [banyan.post("/generate", body)["meta_info"]["dp_rank"] for _ in range(4)]
    assert ranks[0] != ranks[1] and ranks[:2] == ranks[2:]
    assert "banyan:placed_turn" in banyan.get("/metrics")


def test_dispatch_when_the_client_names_a_rank_then_it_is_kept(banyan, prompt):
    ids = prompt("pinned", 200)
    banyan.generate(ids, rank=0, num_tokens=1)
    before = placed(banyan, "pinned")[1]
    _, meta = banyan.generate(ids, rank=1, num_tokens=1)
    assert meta["dp_rank"] == 1
    assert placed(banyan, "pinned")[1] == before + 1


def test_dispatch_when_the_policy_is_unknown_then_sglang_dispatches(banyan, prompt):
    action = {"action_id": "a", "action_type": "banyan.policy", "action_version": "1", "payload": {"policy": "no such"}}
    body = {
        "input_ids": prompt("unknown", 64),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "kv_hints": {"protocol_version": "1", "message_id": "m", "actions": [action]},
    }
    before = sum(placed(banyan, "sglang").values())
    assert len(banyan.post("/generate", body)["output_ids"]) == 1
    assert sum(placed(banyan, "sglang").values()) >= before + 1


def test_dispatch_when_measured_then_its_time_is_told_by_the_ranks(banyan, prompt):
    banyan.generate(prompt("timed", 100), num_tokens=1)
    assert banyan.total("dispatch_us") > 0
