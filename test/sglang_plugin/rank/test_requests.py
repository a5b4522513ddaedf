# SPDX-License-Identifier: Apache-2.0
"""Requests of one ``rid``, and one whose pages have no keys."""

import gc

import pytest
from test.sglang_plugin.rank.matched import Matched
from test.sglang_plugin.rank.test_linker import PAGE, make_rank
from test.sglang_plugin.rank.test_planning import COST, Rank

from banyan import _native, faults
from banyan.config import Config
from banyan.planner import Action
from banyan.sglang_plugin.rank import requests


class Req(Matched):
    """What is read of one of SGLang's that has just come."""

    output_ids, extra_key, cache_salt, lora_id = (), None, None, None

    def __init__(self, rid, **fields):
        self.rid, self.origin_input_ids = rid, list(range(4 * PAGE))
        vars(self).update(fields)
        requests.register(self)


def test_ids_when_a_rid_comes_again_then_they_differ_and_the_rid_is_the_last_ones():
    first, second = Req("W"), Req("W")
    assert requests.id_of(first) != requests.id_of(second) == requests.id_of_rid("W")


def test_gone_when_the_first_of_two_is_forgotten_then_its_own_id_is_told_and_the_second_stays():
    first, second = Req("W"), Req("W")
    told, name = [], requests.id_of(first)
    requests.when_gone(name, told.append)
    del first
    gc.collect()
    assert told == [name] and requests.find(name) is None
    assert requests.find(requests.id_of_rid("W")) is second


def test_chains_when_answers_have_grown_then_those_of_requests_that_have_ended_come_first():
    running = Req("running", output_ids=[7] * PAGE, finished=lambda: False)
    ended = Req("ended", output_ids=[8] * PAGE, finished=lambda: True)
    nothing = Req("nothing", output_ids=[])
    chains = list(requests.grown_chains(PAGE))
    assert chains == [requests._grown_keys(req, PAGE) for req in (ended, running)] and nothing not in chains


def test_plan_when_the_first_of_two_asked_for_something_then_the_second_has_not(monkeypatch):
    rank = Rank(monkeypatch, cost=COST)
    rank.arrive("W", 330, Action.COMPUTE)
    assert rank.plan("W") == 0
    rank.arrive("W", 330)
    assert rank.plan("W") == 20


@pytest.mark.parametrize("space", [{"cache_salt": "\ud800"}, {"extra_key": "\ud800"}])
def test_keys_when_a_cache_namespace_is_no_unicode_then_there_are_none_and_the_request_arrives(monkeypatch, space):
    rank, _, _ = make_rank(monkeypatch, _native.RankTable.create(4), 0, Config(min_fetch_tokens=PAGE, host_gb=0.001))
    req, before = Req("r", **space), faults.counts()
    assert requests.prompt_keys(requests.id_of(req), PAGE) is None
    rank.arrive(requests.id_of(req))
    assert faults.counts() == before


def test_lasting_when_the_latest_request_s_pages_come_then_no_other_one_is_hashed(monkeypatch):
    held = [Req(f"r{number}", origin_input_ids=[number] * 4 * PAGE) for number in range(50)]
    hashed, grown = [], requests._grown_keys
    monkeypatch.setattr(requests, "_grown_keys", lambda req, tokens: hashed.append(req.rid) or grown(req, tokens))
    key = grown(held[-1], PAGE)[0]
    assert requests.is_lasting(key, PAGE) and requests.is_lasting(key, PAGE)
    assert hashed == ["r49"]
    assert not requests.is_lasting("no page's", PAGE)
