# SPDX-License-Identifier: Apache-2.0
"""Who gets a request, on real ranks."""

from __future__ import annotations

import threading
import time
import urllib.error

import pytest
from test.e2e.conftest import MOVE

from banyan.cli.engine import policy_hints

pytestmark = pytest.mark.e2e


ELASTIC = policy_hints({"elastic_prefill_tokens": 500})
# What was computed elsewhere is moved whole: whether its last pages are worth it is the planner's business.
DETOUR_AND_MOVE = {**ELASTIC, "actions": [*ELASTIC["actions"], *MOVE["actions"]]}


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
    body = {
        "input_ids": prompt("turns", 64),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "kv_hints": policy_hints({"policy": "round_robin"}),
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


def test_dispatch_when_the_policy_is_unknown_then_the_request_is_refused_and_names_those_that_there_are(banyan, prompt):
    body = {
        "input_ids": prompt("unknown", 64),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "kv_hints": policy_hints({"policy": "no such"}),
    }
    with pytest.raises(urllib.error.HTTPError) as refused:
        banyan.post("/generate", body)
    assert refused.value.code == 400 and "lmetric" in refused.value.read().decode()


def test_dispatch_when_measured_then_its_time_is_told_by_the_ranks(banyan, prompt):
    banyan.generate(prompt("timed", 100), num_tokens=1)
    assert banyan.total("dispatch_us") > 0


class Session:
    """A conversation on one rank, which another request keeps busy until the end of the ``with`` block."""

    def __init__(self, banyan, prompt, name):
        self.banyan = banyan
        self.name = name
        for rank in (0, 1):
            # A rank that has never computed anything does not say how fast it is.
            banyan.generate(prompt(f"{name}-warm{rank}", 200), rank=rank, num_tokens=1)
        self.rank = self.ask(prompt(f"{name}-first", 100))["meta_info"]["dp_rank"]
        ids, how = prompt(f"{name}-other", 50), {"rank": self.rank, "num_tokens": 250}
        self.other = threading.Thread(target=banyan.generate, args=(ids,), kwargs=how)

    def ask(self, ids, **body):
        return self.banyan.post(
            "/generate",
            {
                "input_ids": ids,
                "routing_key": self.name,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "kv_hints": DETOUR_AND_MOVE,
                **body,
            },
        )

    def __enter__(self):
        self.other.start()
        time.sleep(1)
        return self

    def __exit__(self, *error):
        self.other.join()


def test_detour_when_a_sessions_rank_is_busy_then_another_computes_and_it_fetches(banyan, stock, prompt):
    ids = prompt("detour", 1000)
    expected, _ = stock.generate(ids, num_tokens=1)
    before = banyan.total("detours"), banyan.total("placed_detour"), banyan.total("detours_late")
    with Session(banyan, prompt, "elastic") as session:
        answer = session.ask(ids)
    assert answer["output_ids"] == expected
    assert answer["meta_info"]["dp_rank"] == session.rank
    assert answer["meta_info"]["cached_tokens_details"]["peer"] == 992
    after = banyan.total("detours"), banyan.total("placed_detour"), banyan.total("detours_late")
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 1, 0]
    assert banyan.ranks()[1 - session.rank]["detours"] > 0
    assert "state was deleted" not in banyan.server.log_path.read_text()


def test_detour_when_the_client_gives_up_then_both_requests_end(banyan, prompt):
    with Session(banyan, prompt, "aborted") as session:
        asked = threading.Thread(target=session.ask, args=(prompt("given up", 2500),), kwargs={"rid": "given-up"})
        asked.start()
        time.sleep(0.3)
        banyan.post("/abort_request", {"rid": "given-up"})
        asked.join(30)
        assert not asked.is_alive(), "the request is neither answered nor aborted"
    banyan.post("/flush_cache?timeout=30", {})
    assert len(banyan.generate(prompt("after", 100), num_tokens=1)[0]) == 1
