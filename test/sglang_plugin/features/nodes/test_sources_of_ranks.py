# SPDX-License-Identifier: Apache-2.0
"""A router's word on whose arena has a prompt, from the request to the question: servers' linkers in one process."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from test.sglang_plugin.features.nodes.hinted import Hinted
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, transfer
from test.unit.features.nodes.rig import free_address, until

from banyan import _native
from banyan.config import Config
from banyan.core import Address
from banyan.routing.hint import SourceHint
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import hooks, identity, requests

NUM_PAGES = 4
PROMPT = list(range(100, 100 + NUM_PAGES * PAGE + 2))


def poll(linker, condition):
    def step():
        linker.num_completed_offloads()
        return condition()

    until(step)


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Two that lend, of which the second has the prompt, and one that asks both."""
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(runtime, "config", Config)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of all nodes")
    secret.chmod(0o600)
    rank_tables = []

    def start(**flags):
        rank_tables.append(_native.RankTable.create(5))
        config = Config(min_fetch_tokens=PAGE, host_gb=0.001, secret_file=str(secret), **flags)
        return make_rank(monkeypatch, rank_tables[-1], 0, config)

    page_servers = [free_address(), free_address()]
    empty, _, _ = start(listen=str(page_servers[0]))
    lender, _, pages = start(listen=str(page_servers[1]))
    first = Hinted("first", PROMPT, None)
    requests.register(first)
    lender.offload(transfer(requests.prompt_keys(requests.id_of(first), PAGE), pages.alloc(NUM_PAGES * PAGE)))
    poll(lender, lambda: lender.counters.backed_up_pages == NUM_PAGES)
    asking, _, _ = start(peers=tuple(map(str, page_servers)))
    monkeypatch.setattr(hooks.linker, "installed", lambda: asking)
    until(lambda: asking.state()["nodes"]["num_listening"] == 2)
    made = SimpleNamespace(asking=asking, lender=lender, counters=asking.counters, page_servers=page_servers)
    made.rank_tables = rank_tables
    yield made
    for linker in (asking, lender, empty):
        linker.close()


def ask(servers, source):
    """What was counted once the request is held back no longer: questions, those to one node alone, those spared."""
    req = Hinted("r", PROMPT, source)
    hooks.after_create_generation_req(
        req,
        None,
        SimpleNamespace(routed_dp_rank=None, mm_inputs=None, session_id=None, session_params=None, routing_key="s"),
    )
    poll(servers.asking, lambda: not servers.asking.kinds.full.is_awaited(requests.id_of(req)))
    counters = servers.counters
    return counters.questions, counters.questions_directed, counters.questions_spared


def test_request_when_the_source_is_named_then_it_alone_is_asked_and_its_pages_come(servers):
    assert ask(servers, SourceHint((servers.page_servers[1],))) == (1, 1, 0)
    poll(servers.asking, lambda: servers.counters.pull_pages == NUM_PAGES)


def test_request_when_another_node_is_named_then_who_has_the_prompt_is_not_asked(servers):
    assert ask(servers, SourceHint((servers.page_servers[0],))) == (1, 1, 0)
    assert servers.counters.question_hits == 0


def test_request_when_no_arena_has_it_then_nobody_is_asked(servers):
    assert ask(servers, SourceHint(())) == (0, 0, 1)


@pytest.mark.parametrize("source", [None, SourceHint((Address("10.9.9.9", 7400),))])
def test_request_when_nothing_is_said_or_a_stranger_is_named_then_all_are_asked(servers, source):
    assert ask(servers, source) == (1, 0, 0)
    poll(servers.asking, lambda: servers.counters.pull_pages == NUM_PAGES)


def test_weights_when_they_change_then_who_asks_and_who_lends_take_their_places_again_without_a_collection(servers):
    """A rank that could not would share nothing from then on. SGLang may freeze the collector."""
    ask(servers, None)
    poll(servers.asking, lambda: servers.counters.pull_pages == NUM_PAGES)
    gc.disable()
    try:
        for rank in (servers.asking, servers.lender):
            rank.weights_changed()
    finally:
        gc.enable()
    until(lambda: servers.asking.state()["nodes"]["num_listening"] == 2)
    assert ask(servers, None)[0] == 2 and servers.counters.question_hits == 1
