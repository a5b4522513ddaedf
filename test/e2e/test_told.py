# SPDX-License-Identifier: Apache-2.0
"""A cache that is told what to keep: pins outlive a scan in every tier, and what is prefetched is there."""

from __future__ import annotations

import json
import random
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from test.e2e.conftest import ARGS, CPU, Client, until

from benchmark.modes import models
from benchmark.servers import ServerSpec, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

PAGE = 16
POOL_TOKENS = 1200
PATH = "/banyan/cache"
TELL = ("--max-total-tokens", str(POOL_TOKENS), "--banyan-host-gb", "0.1", "--banyan-store-gb", "0.1")
MORE = ("--banyan-store-admit", "first", "--banyan-told-share", "0.5")


class Told:
    """One server, and the same one again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start()

    def start(self) -> None:
        args = (*ARGS, *TELL, *MORE, "--banyan-store", str(self._folder / "store"))
        self.server = ForkedServer(
            ServerSpec("told", 2, "on", args, CPU), models.ensure(models.PAGES), self._folder / "logs"
        )
        wait_ready([self.server])
        self.client = Client(self.server)

    def tell(self, action, ids=None, **more):
        command = {"action": action, **({} if ids is None else {"input_ids": list(ids)}), **more}
        return self.post(PATH, command)

    def post(self, path, body):
        try:
            return self.client.post(path, body)
        except urllib.error.HTTPError as refused:
            pytest.fail(refused.read().decode())

    def found(self, ids, rank):
        """Tokens of the prompt that were cached, by source."""
        body = {**self.client.body(ids, num_tokens=1), "routed_dp_rank": rank}
        return self.client.post("/generate", body)["meta_info"]["cached_tokens_details"] or {}

    def refusal(self, path, body):
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.client.post(path, body)
        return refused.value.code, refused.value.read().decode()


def prompt(name: str, num_tokens: int) -> list[int]:
    """The same name gives the same prompt."""
    return models.random_prompt(random.Random(name), num_tokens)


@pytest.fixture(scope="module")
def told(alone, tmp_path_factory) -> Iterator[Told]:
    started = Told(tmp_path_factory.mktemp("told"))
    yield started
    started.server.stop()


def test_pins_when_ten_times_the_pools_has_come_then_they_are_there_in_every_tier_and_expired_ones_are_not(
    told,
):
    small, large, brief, plain = (prompt(f"told {name}", size) for name, size in SIZES)
    assert told.tell("pin", small, ttl_s=3600)["num_tokens"] == 320
    hints = {"protocol_version": "1", "message_id": "m", "actions": [action("pin", {"ttl_s": 3600})]}
    told.post("/generate", {**told.client.body(large, num_tokens=1), "kv_hints": hints, "routed_dp_rank": 0})
    told.tell("pin", brief, ttl_s=0.5)
    for ids in (small, brief, plain):
        told.found(ids, 0)
    kept = told.tell("list")["prefixes"]
    assert [(one["num_tokens"], one["in_pool"]) for one in kept if one["expires_in_s"] > 60] == [
        (320, True),
        (480, False),
    ]
    for number in range(2 * 10 * POOL_TOKENS // 600):
        before = told.client.total("backed_up_pages")
        told.client.first_token(prompt(f"told scan {number}", 600), rank=number % 2)
        # What leaves the pool before it is copied down pushes nothing out of the arena.
        until(lambda before=before: told.client.total("backed_up_pages") >= before + 600 // PAGE)
    # What waits to be written pushes nothing out of the store.
    until(lambda: not sum(rank["store"]["backlog_pages"] for rank in told.client.ranks().values()))
    at_rank_0, beyond = told.found(small, 0), told.found(large, 0)
    assert at_rank_0["device"] == 304 and beyond["host"] + beyond["device"] >= 464, (at_rank_0, beyond)
    assert sum(told.found(brief, 0).get(where, 0) for where in SOURCES) == 0
    assert sum(told.found(plain, 0).get(where, 0) for where in SOURCES) == 0
    told.server.stop()
    told.start()
    # What has been read when its prompt's turn comes is in the arena by then.
    found = told.found(small, 1)
    assert found["storage"] + found["host"] == 304, "the store has kept it"
    until(lambda: told.client.total("read_pages") >= 304 // PAGE)


def test_prefetch_when_it_comes_before_the_prompt_then_the_arena_has_it(told):
    ids = prompt("told prefetch", 640)
    told.found(ids, 0)
    until(lambda: told.tell("prefetch", ids)["num_pages_found"] == 40)
    until(lambda: told.client.total("archived_pages") >= 40)
    told.server.stop()
    told.start()
    assert told.tell("prefetch", ids) == {
        **{"action": "prefetch", "num_pages": 40, "num_tokens": 640, "num_pages_found": 40}
    }
    until(lambda: told.client.total("read_pages") >= 40)
    found = told.found(ids, 0)
    assert (found["host"], found["storage"]) == (624, 0), found


def test_pin_when_over_the_budget_or_malformed_then_one_line_and_the_server_goes_on(told):
    ids = list(prompt("told too much", 4000))
    code, said = told.refusal(PATH, {"action": "pin", "input_ids": ids})
    line = json.loads(said)["error"]["message"]
    assert code == 409 and "250 pages more" in line and "--banyan-told-share" in line and "\n" not in line
    hints = {"protocol_version": "1", "message_id": "m", "actions": [action("pin", {"input_ids": ids})]}
    code, said = told.refusal("/generate", {**told.client.body(prompt("told", 40)), "kv_hints": hints})
    assert code == 400 and "kv_hints: pin: 250 pages more" in said
    hints["actions"] = [action("retain", {"input_ids": [1, 2]}), action("prefetch", {"input_ids": [1, 2]})]
    told.post("/generate", {**told.client.body(prompt("told", 40)), "kv_hints": hints})
    code, said = told.refusal(PATH, {"action": "demote", "input_ids": ids + ids})
    assert code == 400 and "8000 tokens, the model takes 4096 at most" in said
    assert told.refusal(PATH, {"action": "pin", "input_ids": [1, -1]})[0] == 400
    assert told.refusal(PATH, {"action": "pin", "input_ids": ids[:32], "ttl_s": "x"})[0] == 400
    assert told.refusal(PATH, {"action": "burn", "input_ids": ids[:32]})[0] == 400


def test_session_when_it_is_closed_then_what_was_pinned_for_it_is_released_on_all_ranks(told):
    hints = {"protocol_version": "1", "message_id": "m", "actions": [action("pin", {})]}
    body = {**told.client.body(prompt("told session", 100)), "kv_hints": hints, "cache_salt": "of a session"}
    told.post("/generate", {**body, "session_id": "told session"})
    assert [one["num_tokens"] for one in told.tell("list", cache_salt="of a session")["prefixes"]] == [96]
    told.client.post("/close_session", {"session_id": "told session"})
    until(lambda: not told.tell("list", cache_salt="of a session")["prefixes"])
    until(lambda: all(not rank["told"]["num_tenants"] for rank in told.client.ranks().values()))


SIZES = (("small", 320), ("large", 480), ("brief", 256), ("plain", 320))
SOURCES = ("device", "peer", "host", "storage")


def action(kind, payload):
    return {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload}
