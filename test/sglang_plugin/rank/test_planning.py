# SPDX-License-Identifier: Apache-2.0
"""The rank's planner through the linker's calls: plan, lease, batch, forward, end of the move."""

from types import SimpleNamespace

import msgspec
import pytest
from test.sglang_plugin.rank.matched import Matched

from banyan.config import Config
from banyan.core import Fetch, Offer, Outcome, PrefixSpan, Run, SourceKind
from banyan.pacing.write_pause import WritePause
from banyan.planner import Action, PrefillCost, PrefillTimes, asked
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import hooks, linker, planning, prefill, requests
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.telemetry import Counters

PAGE, LAYERS = 16, 30
COST = PrefillCost(fixed_us=1000.0, token_us=100.0, pair_us=0.0, context_us=0.0)
FOUND = [Run(SourceKind.PEER, 20)]


class Rank:
    """A planner, and the requests that it is asked about."""

    def __init__(self, monkeypatch, *, plan="measured", cost=None):
        monkeypatch.setattr(runtime, "config", lambda: Config(plan=plan))
        monkeypatch.setattr(runtime, "is_sharing", lambda: True)
        monkeypatch.setattr(
            linker, "installed", lambda: SimpleNamespace(arrive=lambda request: None, counters=Counters())
        )
        monkeypatch.setattr(planning, "PrefillTimes", lambda **more: PrefillTimes(cost, **more))
        self.pieces = ()
        monkeypatch.setattr(prefill, "pieces_of_this_pass", lambda: self.pieces)
        self.planner = RankPlanner(num_layers=LAYERS, page_tokens=PAGE, min_pages=1)
        self.requests = []

    def arrive(self, rid, num_tokens, action=None):
        hints = None
        if action is not None:
            hint = SimpleNamespace(action_type=asked.ACTION_TYPE, action_version="1", payload=asked.payload(action))
            hints = SimpleNamespace(actions=[hint])
        req = FakeReq(rid, hints, num_tokens)
        hooks.after_create_generation_req(
            req,
            None,
            SimpleNamespace(routed_dp_rank=None, mm_inputs=None, session_id=None, session_params=None, routing_key="s"),
        )
        self.requests.append(req)

    def plan(self, rid, *, num_tail_pages=20, found=FOUND):
        facts = requests.facts(requests.id_of_rid(rid), PAGE)
        return self.planner.num_pages(facts, num_tail_pages, Offer(tuple(found), 0))

    def explained(self, rid):
        (one,) = [plan for plan in self.planner.state()["plans"] if plan["rid"] == rid]
        return one

    def move(self, rid, *, per_token_us, outcome=Outcome.LANDED):
        """One batch that moves what was planned for ``rid``, as the cache tells it."""
        request = requests.id_of_rid(rid)
        fetch = Fetch(request, (Run(SourceKind.PEER, self.plan(rid)),), PAGE)
        self.planner.became(request, Outcome.LEASED)
        self.planner.started([fetch])
        self.planner.became(request, outcome)
        if outcome is Outcome.LANDED:
            self.planner.moved([fetch], fetch.tokens.total() * per_token_us / 1e6)


class FakeReq(Matched):
    def __init__(self, rid, kv_hints, num_tokens):
        self.rid, self.kv_hints, self.origin_input_ids, self.output_ids = rid, kv_hints, range(num_tokens), []
        # SGLang fills this in when it has chosen the request; some of its policies look prefixes up before.
        self.full_untruncated_fill_ids = []


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch, cost=COST)


def test_plan_when_nothing_was_measured_then_all_is_moved_and_own_pages_are_told(rank):
    rank.arrive("r", 16 * 25 + 3)
    assert rank.plan("r") == 20
    explained = rank.explained("r")
    assert (explained["own_tokens"], explained["prompt_tokens"]) == (80, 403)
    assert "not known yet" in explained["reason"]


def test_plan_when_moves_proved_slow_then_computed_and_when_asked_then_moved(rank):
    for number in range(4):
        rank.arrive(f"slow{number}", 330)
        rank.move(f"slow{number}", per_token_us=5000.0)
        # From the second on, computing is preferred: the move has to be asked for.
        rank.arrive(f"asked{number}", 330, Action.MOVE)
        rank.move(f"asked{number}", per_token_us=5000.0)
    rank.arrive("r", 330)
    assert rank.plan("r") == 0
    rank.arrive("wish", 330, Action.MOVE)
    assert rank.plan("wish") == 20


def test_forward_when_it_was_timed_after_others_had_begun_then_its_own_pieces_are_learnt(rank):
    rank.pieces = ((0, 100),)
    rank.planner.started([])
    rank.planner.forward_begins()
    first = rank.planner.pieces_running
    rank.pieces = ((0, 200),)
    rank.planner.started([])
    rank.planner.forward_begins()
    rank.planner.forward_took(first, 10.0)
    (learnt,) = rank.planner.state()["forwards"]
    assert learnt == {"number": 0, "pieces": first, "forward_us": 10 * LAYERS}


def test_decode_window_when_moves_and_forwards_were_measured_then_both_are_told(monkeypatch):
    fresh = Rank(monkeypatch)
    assert (fresh.planner.decode_us(), fresh.planner.token_us()) == (None, None)
    rank = Rank(monkeypatch, cost=COST)
    rank.arrive("r", 330)
    rank.move("r", per_token_us=7.0)
    assert rank.planner.decode_us() == pytest.approx(COST.fixed_us + COST.token_us)
    assert rank.planner.token_us() == pytest.approx(7.0)


def test_plan_when_the_server_always_moves_then_moved_but_a_request_may_still_ask(monkeypatch):
    rank = Rank(monkeypatch, plan="move", cost=COST)
    rank.arrive("r", 330)
    rank.move("r", per_token_us=9e6)
    rank.arrive("again", 330)
    assert rank.plan("again") == 20
    rank.arrive("wish", 330, Action.COMPUTE)
    assert rank.plan("wish") == 0


def test_counters_when_plans_were_made_then_they_are_counted_once_each(rank):
    rank.arrive("moved", 330)
    for _ in range(3):
        rank.plan("moved")
    rank.arrive("computed", 330, Action.COMPUTE)
    rank.plan("computed")
    rank.arrive("nothing", 330)
    rank.plan("nothing", found=[])
    counters = Counters()
    for rid in ("moved", "computed", "nothing"):
        rank.planner.computed(requests.id_of_rid(rid), {})
    rank.planner.count(counters)
    assert (counters.plans_moved, counters.plans_computed) == (1, 1)


def test_plan_when_the_request_is_gone_then_what_was_found_is_moved(rank):
    assert rank.plan("unknown") == 20


def test_outcome_when_the_move_landed_or_not_then_it_is_told(rank):
    for rid, outcome in (("good", Outcome.LANDED), ("bad", Outcome.FAILED)):
        rank.arrive(rid, 330)
        rank.move(rid, per_token_us=1.0, outcome=outcome)
        assert rank.explained(rid)["outcome"] == outcome.value
    assert rank.planner.state()["move_us_per_token"] == {"peer": {"128": pytest.approx(1.0)}}


def test_moved_when_the_copy_took_no_measurable_time_then_nothing_is_learnt(rank):
    rank.arrive("r", 330)
    rank.move("r", per_token_us=0.0)
    assert rank.planner.state()["move_us_per_token"] == {}


def test_read_when_nobody_followed_it_then_it_tells_that_the_store_is_faster_than_it_was(rank):
    for read_s in (9.0, 0.001):
        rank.planner.was_read(Run(SourceKind.STORE, 20), read_s)
        assert rank.planner.state()["move_us_per_token"] == {}
    rank.planner._rates.observe(SourceKind.STORE, 320, 320 * 10.0)
    rank.planner.was_read(Run(SourceKind.STORE, 20), 320 * 2e-6)
    assert rank.planner.state()["move_us_per_token"] == {"storage": {"128": pytest.approx(6.0)}}


def test_read_when_one_node_has_proved_slow_then_others_are_borrowed_from_all_the_same(rank):
    for node, per_token_us in (("slow:1", 5000.0), ("quick:1", 1.0)):
        for _ in range(4):
            rank.planner.moved([Fetch("r", (Run(SourceKind.REMOTE, 20, node),), PAGE)], 320 * per_token_us / 1e6)
    found = {node: Run(SourceKind.REMOTE, 20, node) for node in ("slow:1", "quick:1", "new:1")}
    worth = {}
    for node, run in found.items():
        rank.arrive(node, 330)
        facts = requests.facts(requests.id_of_rid(node), PAGE)
        worth[node] = rank.planner.num_to_read(facts, 20, run)
    assert worth == {"slow:1": 0, "quick:1": 20, "new:1": 20}
    rank.arrive("r", 330)
    facts = requests.facts(requests.id_of_rid("r"), PAGE)
    less = Run(SourceKind.REMOTE, 15, "quick:1")
    assert rank.planner.choose_read(facts, 20, [found["slow:1"], less]) == 1
    gone = requests.facts("gone", PAGE)
    assert rank.planner.choose_read(gone, 20, [found["slow:1"], less]) == 0
    assert rank.planner.state()["move_us_per_token"].keys() == {"slow:1", "quick:1"}
    rank.planner.was_read(found["slow:1"], 320 * 1e-6)
    assert rank.planner.state()["move_us_per_token"]["slow:1"]["128"] < 5000.0


def test_plan_when_a_single_token_would_be_left_then_a_page_less_is_moved(rank):
    rank.arrive("r", 16 * 20 + 1)
    assert rank.plan("r") == 19
    rank.arrive("s", 16 * 20 + 2)
    assert rank.plan("s") == 20


def test_forward_when_a_prefill_ran_then_its_time_is_learnt_and_decodes_are_not(rank):
    rank.pieces = ((100, 32),)
    rank.planner.started([])
    for layer_us in (50.0, 1.0, 2.0):
        rank.planner.forward_begins()
        rank.planner.forward_ended(layer_us)
    (forward,) = rank.planner.state()["forwards"]
    assert forward == {"number": 0, "pieces": ((100, 32),), "forward_us": 1500}


def test_state_when_it_goes_over_the_wire_then_it_is_plain(rank):
    rank.arrive("r", 330)
    rank.move("r", per_token_us=1.0)
    rank.pieces = ((330, 0),)
    rank.planner.started([])
    rank.planner.forward_begins()
    rank.planner.forward_ended(10.0)
    state = rank.planner.state()
    assert msgspec.json.decode(msgspec.json.encode(state))["forwards"][0]["pieces"] == [[330, 0]]


class Store:
    def __init__(self):
        self.told = []

    def pause_writes(self):
        self.told.append("pause")

    def open_writes(self):
        self.told.append("open")


def test_store_when_prefills_and_decodes_alternate_then_it_writes_beside_decodes_only(rank):
    store = Store()
    rank.planner.writes = WritePause(store)
    for _ in range(2):
        rank.pieces = ((16, 320),)
        rank.planner.started([])
        # A prefill, then a decode step.
        for _ in range(2):
            rank.planner.forward_begins()
            rank.planner.forward_ended(10.0)
    assert store.told == ["pause", "open", "pause", "open"]


def test_store_when_no_decode_follows_a_prefill_and_the_device_tells_no_end_then_an_idle_rank_writes(rank):
    store = Store()
    rank.planner.step_begins()
    rank.planner.writes = WritePause(store)
    rank.pieces = ((16, 320),)
    rank.planner.started([])
    rank.planner.forward_begins()
    rank.planner.forward_took(rank.planner.pieces_running, 10.0)
    for _ in range(2):
        assert store.told == ["pause"]
        rank.planner.step_begins()
    assert store.told == ["pause", "open"]


def test_shown_forwards_when_there_were_many_then_the_newest_with_their_numbers(rank, monkeypatch):
    monkeypatch.setattr(planning, "NUM_SHOWN_FORWARDS", 2)
    for number in range(5):
        rank.pieces = ((number + 1, 0),)
        rank.planner.started([])
        rank.planner.forward_begins()
        rank.planner.forward_ended(10.0)
    assert [forward["number"] for forward in rank.planner.state()["forwards"]] == [3, 4]


@pytest.mark.parametrize(("start", "num_pages"), [(16, 1), (320, 20), (639, 39), (-1, 39), (0, 0)])
def test_request_when_its_answer_says_something_of_the_prompt_then_what_is_not_looked_for_is_not_its_ranks_own(
    rank, start, num_pages
):
    """SGLang looks for no page behind ``logprob_start_len``: that the rank lacks all of those before it means that it
    has none."""
    rank.arrive("r", 640)
    (req,) = rank.requests
    req.return_logprob, req.logprob_start_len = True, start
    facts = requests.facts(requests.id_of_rid("r"), PAGE)
    offer = Offer((Run(SourceKind.PEER, num_pages),), 1)
    assert facts.span(num_pages, offer) == PrefixSpan(0, num_pages * PAGE, 1)
    assert facts.tail(num_pages, offer.runs).own_tokens == 0
    assert facts.tail(num_pages, offer.runs).prompt_tokens == 640
    if num_pages > 3:
        assert facts.span(num_pages - 3, offer.first(num_pages - 3)).origin_tokens == 3 * PAGE


def test_request_when_it_has_just_come_then_all_its_pages_count_for_sglang_has_not_said_how_far_it_looks(rank):
    rank.arrive("r", 640)
    (req,) = rank.requests
    # As SGLang makes it; it sets the place later.
    req.return_logprob, req.logprob_start_len = True, 0
    facts = requests.facts_of_all_pages(requests.id_of_rid("r"), PAGE)
    assert [facts.tail(num_pages, ()).own_tokens for num_pages in (39, 19)] == [0, 20 * PAGE]
