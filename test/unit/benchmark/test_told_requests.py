# SPDX-License-Identifier: Apache-2.0
"""Requests that are drawn about what caches keep, about memory, and with keys."""

import json
import random

from banyan.routing.cache_path import CACHE_PATH
from benchmark import drawn_keys, told_requests
from benchmark.drawn_requests import Drawn
from benchmark.http_fuzz import drawn
from benchmark.told_requests import ACTIONS, HUGE, MEMORY

PROMPT = list(range(3, 203))
SECRETS = ("01" * 16 + "ab" * 16, "23" * 16 + "cd" * 16)


def test_requests_when_many_are_drawn_then_all_actions_paths_and_sizes_come():
    asked = [told_requests.request(random.Random(number), PROMPT) for number in range(1500)]
    paths = {one.path for one in asked}
    assert paths >= {CACHE_PATH, "/generate", "/v1/messages", "/open_session", "/close_session", *MEMORY}
    commands = [json.loads(one.body) for one in asked if one.path == CACHE_PATH]
    said = {one["action"] for one in commands if isinstance(one.get("action"), str)}
    assert said >= set(ACTIONS)
    ids = [one["input_ids"] for one in commands if isinstance(one.get("input_ids"), list)]
    assert max(map(len, ids)) == max(HUGE)
    assert any("cache_control" in one.body.decode() for one in asked)


def test_command_when_drawn_often_then_some_come_again():
    asked = [told_requests.request(random.Random(number), PROMPT).body for number in range(1500)]
    assert len(set(asked)) < len(asked)


def test_numbers_when_drawn_then_every_fourth_is_about_caches_and_the_others_are_what_they_were():
    by_number = [drawn(number, PROMPT) for number in range(400)]
    assert CACHE_PATH in {one.path for one in by_number[3::4]}
    assert CACHE_PATH not in {one.path for number, one in enumerate(by_number) if number % 4 != 3}


def test_keys_when_drawn_then_those_of_one_tenant_alone_are_known():
    asked = Drawn("/generate", {"Connection": "close"}, b"{}")
    keyed = [drawn_keys.keyed(random.Random(number), asked) for number in range(500)]
    assert 100 < sum(one.is_known for one in keyed) < 450
    for one in keyed:
        said = [one.drawn.headers[name] for name in drawn_keys.HEADERS if name in one.drawn.headers]
        if one.is_known:
            assert len({key := text.strip().split(" ")[-1] for text in said}) == 1 and key in drawn_keys.KEYS.values()
    assert not any(one.is_known for one in keyed if not set(one.drawn.headers) & set(drawn_keys.HEADERS))


def test_words_when_forged_then_only_a_routers_own_is_known():
    asked = Drawn("/generate", {}, b"{}")
    forged = [drawn_keys.forged(random.Random(number), asked, SECRETS) for number in range(200)]
    assert {one.drawn.headers["x-banyan-tenant"] for one in forged if one.is_known} == set(SECRETS)
    assert not {one.drawn.headers["x-banyan-tenant"] for one in forged if not one.is_known} & set(SECRETS)
