# SPDX-License-Identifier: Apache-2.0
"""A router's word on who reads, from the request to the pool: two servers' linkers in one process, one store."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test.sglang_plugin.features.nodes.hinted import Hinted
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, page, transfer
from test.unit.features.nodes.rig import free_address, until

from banyan import _native
from banyan.arena.page_source import all_that_is_found
from banyan.config import Config
from banyan.features.nodes.rank import node_access
from banyan.features.nodes.rank.read_elsewhere import ReadElsewhere
from banyan.observe.request_history import decisions_of
from banyan.routing.hint import ReadHint
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import hooks, identity, requests
from banyan.sglang_plugin.rank.linker import BanyanLinker

NUM_PAGES = 6
PROMPT = list(range(100, 100 + NUM_PAGES * PAGE + 2))


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """What reads for the other (its pages are in the store, and nowhere else), and the other one."""
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(runtime, "config", Config)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(node_access, "LEAST_PART_TOKENS", PAGE)
    secret, address = tmp_path / "secret", free_address()
    secret.write_bytes(b"a secret of all nodes")
    secret.chmod(0o600)
    # Slow enough that a read is seen on its way.
    store = {"store": (str(tmp_path / "store"),), "store_gb": 0.01, "store_admit": "first", "store_read_mb_per_s": 1}
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, secret_file=str(secret), **store)
    rank_tables = [_native.RankTable.create(5) for _ in range(2)]
    d, d_pool, d_pages = make_rank(monkeypatch, rank_tables[0], 0, replace(config, listen=str(address)))
    first = Hinted("first", PROMPT, None)
    requests.register(first)
    names, slots = requests.prompt_keys(requests.id_of(first), PAGE), d_pages.alloc(NUM_PAGES * PAGE)
    d.kinds.full.tier.store.learn([names])
    d.offload(transfer(names, slots))
    poll(d, lambda: d.counters.archived_pages == NUM_PAGES)
    expected = page(d_pool, slots).clone()
    d.kinds.full.tier.residency.reset()
    p, p_pool, p_pages = make_rank(monkeypatch, rank_tables[1], 0, replace(config, peers=(str(address),)))
    monkeypatch.setattr(hooks.linker, "installed", lambda: p)
    until(lambda: p.state()["nodes"]["num_listening"] == 1)
    yield SimpleNamespace(
        d=d, p=p, names=names, expected=expected, pool=p_pool, pages=p_pages, rank_tables=rank_tables, node=str(address)
    )
    p.close()
    d.close()


def poll(linker, condition):
    def step():
        linker.num_completed_offloads()
        return condition()

    until(step)


def ask(servers, rid, reads):
    req = Hinted(rid, PROMPT, reads)
    hooks.after_create_generation_req(
        req,
        None,
        SimpleNamespace(routed_dp_rank=None, mm_inputs=None, session_id=None, session_params=None, routing_key="s"),
    )
    return req


def fetch(servers, rid):
    """The prompt's pages, in this server's pool; SGLang's steps."""
    assert servers.p.lookup(rid, transfer(servers.names, None)) == [NUM_PAGES]
    slots = servers.pages.alloc(NUM_PAGES * PAGE)
    assert servers.p.load(rid, transfer(servers.names, slots))
    assert servers.p.finish_layer_wise_loading(servers.p.start_layer_wise_loading())
    return page(servers.pool, slots)


@pytest.mark.parametrize("num_own", [0, 2])
def test_request_when_the_router_says_who_reads_then_both_do_and_it_has_the_right_pages(servers, num_own):
    req = ask(servers, "r", ReadHint(servers.node, num_own * PAGE))
    assert servers.p.kinds.full.is_awaited(requests.id_of_rid("r"))
    seen = []

    def step():
        servers.d.num_completed_offloads()
        seen.append(servers.rank_tables[0].reading(0))
        return not servers.p.kinds.full.is_awaited(requests.id_of_rid("r"))

    poll(servers.p, step)
    assert max(seen) == NUM_PAGES - num_own, "what it reads for others is in its read queue"
    assert torch.equal(fetch(servers, req.rid), servers.expected)
    state = servers.p.state()
    (plan,) = decisions_of("r", state["rid_nonce"], state["plans"])
    assert plan["found"][-1] == ["remote", NUM_PAGES - num_own, servers.node]
    poll(servers.d, lambda: servers.rank_tables[0].read_rate(0) > 0)
    assert (
        servers.p.state()["waits_for_remote_prefetches"]
        and servers.d.state()["page_server"]["most_read_tokens"] >= NUM_PAGES * PAGE
    )


def test_request_when_its_pages_leave_before_its_turn_then_the_other_one_reads_them_once(servers):
    p, tier = servers.p, servers.p.kinds.full.tier
    tier.prefetch.start_reads(servers.names, all_that_is_found)
    poll(p, lambda: p.counters.read_pages == NUM_PAGES)
    req = ask(servers, "r", ReadHint(servers.node, 0))
    assert not p.kinds.full.is_awaited(requests.id_of_rid("r")), "all is here"
    tier.residency.reset()
    assert p.lookup("r", transfer(servers.names, None)) == [] and p.kinds.full.is_awaited(requests.id_of_rid("r"))

    def step():
        servers.d.num_completed_offloads()
        return not p.kinds.full.is_awaited(requests.id_of_rid("r"))

    poll(p, step)
    assert torch.equal(fetch(servers, req.rid), servers.expected)
    poll(p, lambda: p.counters.pull_pages == NUM_PAGES)
    tier.residency.reset()
    assert p.lookup("r", transfer(servers.names, None)) == [NUM_PAGES] and not p.kinds.full.is_awaited(
        requests.id_of_rid("r")
    )
    assert (p.counters.remote_prefetches_sent, p.counters.reads) == (1, 2)


def test_request_when_nobody_is_named_then_it_is_read_here(servers):
    req = ask(servers, "r", None)
    assert torch.equal(fetch(servers, req.rid), servers.expected)
    assert servers.d.counters.remote_prefetches == 0


def test_request_when_its_rank_cannot_hold_it_back_then_it_is_read_here(servers):
    (elsewhere,) = [one for one in servers.p.attachments if isinstance(one, ReadElsewhere)]
    elsewhere.can_wait = False
    req = ask(servers, "r", ReadHint(servers.node, 0))
    assert torch.equal(fetch(servers, req.rid), servers.expected)
    assert servers.p.counters.remote_prefetches_sent == 0


class Watched:
    """A store, and for how many pages each lookup has asked it."""

    def __init__(self, store):
        self._store, self.asked = store, []

    def lookup(self, keys):
        self.asked.append(len(keys))
        return self._store.lookup(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_request_when_this_rank_is_to_read_at_its_turn_then_nothing_more_is_looked_up_to_be_read(servers, monkeypatch):
    p, tier = servers.p, servers.p.kinds.full.tier
    tier.prefetch.start_reads(servers.names, all_that_is_found)
    poll(p, lambda: p.counters.read_pages == NUM_PAGES)
    req = ask(servers, "r", ReadHint(servers.node, NUM_PAGES * PAGE))
    tier.residency.reset()
    store = Watched(tier.prefetch._store)
    monkeypatch.setattr(tier.prefetch, "_store", store)
    # The last page is nowhere.
    assert p.lookup(req.rid, transfer([*servers.names, "f" * 64], None)) == [NUM_PAGES]
    assert store.asked == [NUM_PAGES] and not p.kinds.full.is_awaited(requests.id_of(req))
    poll(p, lambda: p.counters.read_pages == 2 * NUM_PAGES)
    assert torch.equal(fetch(servers, req.rid), servers.expected)


def test_request_when_several_nodes_have_some_of_its_prompt_then_the_ranks_planner_chooses(servers, monkeypatch):
    asked = []
    monkeypatch.setattr(servers.p._planner, "choose_read", lambda *asked_for: asked.append(asked_for) or 1)
    (path,) = servers.p.kinds.full.tier.sources
    assert path._nodes._choose("gone", NUM_PAGES, ["one", "another"]) == 1
    ((facts, *found),) = asked
    assert (facts.id, found) == ("gone", [NUM_PAGES, ["one", "another"]])
    monkeypatch.setattr(BanyanLinker, "is_whole_rank", False)
    assert path._nodes._choose("gone", NUM_PAGES, ["one", "another"]) == 0, "its shards would have to choose alike"
