# SPDX-License-Identifier: Apache-2.0
"""Requests of one ``rid``, and one whose pages have no keys."""

import gc

import pytest
from test.sglang_plugin.rank.hooked import hooked
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


INSERT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"


def inserted(req, look):
    """What ``look`` says while the pages of ``req`` enter SGLang's tree."""
    seen = []
    hooked(INSERT, lambda tree, req, *, up_to: seen.append(look()))(None, req, up_to=1)
    return seen[0]


def test_chain_when_pages_enter_the_tree_then_it_is_their_requests_with_its_answer_and_no_other_is_hashed(monkeypatch):
    held = [Req(f"r{number}", origin_input_ids=[number] * 4 * PAGE, output_ids=[7] * PAGE) for number in range(50)]
    hashed, grown = [], requests._grown_keys
    monkeypatch.setattr(requests, "_grown_keys", lambda req, tokens: hashed.append(req.rid) or grown(req, tokens))
    chain = inserted(held[3], lambda: requests.inserted_chain(PAGE))
    assert chain == grown(held[3], PAGE) and len(chain) == 5 and hashed == ["r3"]
    assert requests.inserted_chain(PAGE) is None, "the insertion is over"


def ended(rid, num_new, **fields):
    """A request with an answer of two pages, of whose prompt so many pages were asked for the first time."""
    req = Req(rid, **{"origin_input_ids": list(range(3 * PAGE + 1)), "output_ids": [7] * 2 * PAGE, **fields})
    req.finished = lambda: True
    requests.note_new(requests.id_of(req), num_new, PAGE)
    return req


def test_answer_when_its_request_has_ended_then_its_pages_are_told_once_behind_its_prompt():
    req = ended("r", 3, cache_salt="s")
    chain = requests._grown_keys(req, PAGE)
    assert len(chain) == 5
    assert inserted(req, lambda: requests.inserted_answer(PAGE)) == ("s", chain[2], chain[3:])
    assert inserted(req, lambda: requests.inserted_answer(PAGE)) is None
    assert requests.inserted_answer(PAGE) is None, "the insertion is over"


@pytest.mark.parametrize(
    "req",
    [
        pytest.param(lambda: ended("r", 0), id="asked for before"),
        pytest.param(lambda: ended("r", 2, origin_input_ids=list(range(3 * PAGE))), id="none of it on the next page"),
        pytest.param(lambda: ended("r", 3, output_ids=[7]), id="less than a page"),
    ],
)
def test_answer_when_its_pages_say_nothing_of_it_then_none_is_told(req):
    assert inserted(req(), lambda: requests.inserted_answer(PAGE)) is None


def test_answer_when_its_request_goes_on_then_none_is_told_yet():
    req = ended("r", 3)
    req.finished = lambda: False
    assert inserted(req, lambda: requests.inserted_answer(PAGE)) is None
    req.finished = lambda: True
    assert inserted(req, lambda: requests.inserted_answer(PAGE)) is not None


def test_keys_when_a_request_brings_vectors_for_some_of_its_tokens_then_nothing_is_looked_up_for_it():
    """SGLang matches it against nothing, and puts none of its pages into its tree."""
    plain, told = Req("a"), Req("b", positional_embed_overrides=object())
    assert len(requests.prompt_keys(requests.id_of(plain), PAGE)) == 3
    assert requests.prompt_keys(requests.id_of(told), PAGE) is None


@pytest.mark.parametrize(
    ("lora_id", "is_lasting"), [(None, True), ("a" * 32, False), ("banyan-adapter-" + "a" * 64, True)]
)
def test_lasting_when_pages_enter_the_tree_then_their_request_says(lora_id, is_lasting):
    assert inserted(Req("r", lora_id=lora_id), requests.is_lasting_inserted) == is_lasting
    assert not requests.is_lasting_inserted(), "nobody knows whose they are"


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
