# SPDX-License-Identifier: Apache-2.0
import json
import random
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test.conftest import examples

from banyan.core import Outcome, Refusal, Run, SourceKind
from banyan.planner import (
    Action,
    ForwardSample,
    MoveRates,
    Planner,
    PrefillCost,
    PrefillTimes,
    Pricing,
    Tail,
)
from banyan.planner.plan import PlanReason
from banyan.telemetry import Why

COST = PrefillCost(fixed_us=1000.0, token_us=100.0, pair_us=0.01, context_us=0.0)
PAGE = 16
LAYERS = 30
PEER, HOST, STORE = SourceKind.PEER, SourceKind.HOST, SourceKind.STORE


def tail(*runs, own=0, new=8):
    """A tail whose found pages are followed by ``new`` tokens that nobody has."""
    found = tuple(Run(kind, num_pages) for kind, num_pages in runs)
    prompt = own + sum(num_pages for _, num_pages in runs) * PAGE + new
    return Tail(own_tokens=own, prompt_tokens=prompt, page_tokens=PAGE, runs=found)


def rates_of(**per_token_us):
    rates = MoveRates()
    for kind, value in per_token_us.items():
        for num_tokens in (16, 256, 4096):
            for _ in range(5):
                rates.observe(SourceKind[kind], num_tokens, value * num_tokens)
    return rates


def planner(rates, *, times=None, min_pages=1, num_kinds=1, **more):
    pricing = Pricing(times=times or PrefillTimes(COST), rates=rates, num_layers=LAYERS, **more)
    return Planner(pricing, min_pages=min_pages, num_kinds=num_kinds)


def test_plan_when_eight_ranks_would_wait_for_a_move_then_only_what_hides_is_moved():
    # What comes from the store is moved whole or not at all.
    exposed, hidden = tail((STORE, 100)), tail((STORE, 100), new=3_000)
    alone, together = (planner(rates_of(STORE=90.0), num_in_step=num) for num in (1, 8))
    assert (alone.decide("exposed", exposed).num_pages, together.decide("exposed", exposed).num_pages) == (100, 0)
    assert together.decide("hidden", hidden).num_pages == alone.decide("hidden", hidden).num_pages == 100


def test_plan_when_moving_is_faster_then_all_is_moved_and_the_figures_say_so():
    plan = planner(rates_of(PEER=1.0)).decide("r", tail((PEER, 100)))
    assert (plan.num_pages, plan.reason) == (100, PlanReason.FASTER)
    assert plan.best.total_us < plan.recompute.total_us
    assert plan.best.move_us == pytest.approx(1600.0)


def test_plan_when_moving_is_slower_then_computed():
    plan = planner(rates_of(STORE=5000.0)).decide("r", tail((STORE, 20)))
    assert (plan.num_pages, plan.reason) == (0, PlanReason.FASTER)


def test_plan_when_moving_takes_as_long_as_computing_then_the_cut_is_where_both_end_together():
    """Half of the tail moves while the other half is computed: about half the time of either alone."""
    plan = planner(rates_of(STORE=100.0)).decide_read("r", tail((STORE, 200)))
    assert 80 <= plan.num_pages <= 120
    assert plan.best.move_us == pytest.approx(plan.best.compute_us, rel=0.2)
    assert plan.best.total_us < 0.6 * plan.recompute.total_us


def test_plan_when_a_slow_run_follows_a_fast_one_then_only_the_fast_one_is_moved():
    plan = planner(rates_of(PEER=0.5, STORE=4000.0)).decide("r", tail((PEER, 64), (STORE, 64)))
    assert plan.num_pages == 64


@pytest.mark.parametrize(
    ("asked_tail", "expected"),
    [(tail(), PlanReason.NOTHING_FOUND), (tail((PEER, 3)), PlanReason.TOO_SHORT)],
)
def test_plan_when_nothing_worth_a_move_was_found_then_computed(asked_tail, expected):
    plan = planner(rates_of(PEER=1.0), min_pages=4).decide("r", asked_tail)
    assert (plan.num_pages, plan.reason) == (0, expected)


@pytest.mark.parametrize(
    ("times", "rates"),
    [(PrefillTimes(), rates_of(PEER=9e9)), (PrefillTimes(COST), MoveRates())],
    ids=["prefill", "move"],
)
def test_plan_when_a_time_is_not_known_then_what_was_found_is_moved(times, rates):
    plan = planner(rates, times=times).decide("r", tail((PEER, 10)))
    assert (plan.num_pages, plan.reason) == (10, PlanReason.UNMEASURED)


@pytest.mark.parametrize(
    ("long_tokens", "reason"), [((), PlanReason.UNMEASURED), (range(4000, 10_000, 100), PlanReason.FASTER)]
)
def test_plan_when_the_last_forwards_were_short_then_a_long_tail_is_still_moved(long_tokens, reason):
    times = PrefillTimes()
    for num_tokens in [*long_tokens, *[1] * 128]:
        times.observe(ForwardSample(((num_tokens, 0),), COST.time_us([(num_tokens, 0)])))
    plan = planner(rates_of(PEER=5.0), times=times).decide("r", tail((PEER, 512), new=1000))
    assert (plan.num_pages, plan.reason) == (512, reason)


def test_plan_when_long_prefills_scatter_then_a_difference_within_that_is_no_reason_to_change():
    times = SimpleNamespace(expected=lambda piece: (100.0 * piece[0], 50.0 * piece[0] if piece[0] > 16 else 0.0, 0.0))
    plan = planner(rates_of(STORE=110.0), times=times).decide("r", tail((STORE, 100)))
    assert (plan.num_pages, plan.reason) == (100, PlanReason.KEPT)


@pytest.mark.parametrize(("action", "num_pages"), [(Action.MOVE, 20), (Action.COMPUTE, 0)])
def test_plan_when_the_request_asks_then_it_gets_it_and_the_figures_are_kept(action, num_pages):
    plan = planner(rates_of(STORE=5000.0)).decide("r", tail((STORE, 20)), action)
    assert (plan.num_pages, plan.reason) == (num_pages, PlanReason.ASKED)
    assert plan.recompute is not None


def test_plan_when_the_same_request_asks_again_then_the_answer_stands_though_rates_moved():
    rates = rates_of(PEER=1.0)
    ours = planner(rates, min_pages=40)
    first = ours.decide("r", tail((PEER, 50)))
    for _ in range(50):
        rates.observe(PEER, 800, 1e9)
    assert ours.decide("r", tail((PEER, 50))) is first
    assert ours.decide("r", tail((PEER, 49))).num_pages == 0


def test_plan_when_more_requests_wait_than_are_told_then_none_is_planned_again():
    ours, found = planner(rates_of(PEER=1.0)), tail((PEER, 50))
    passes = [[ours.decide(f"r{number}", found) for number in range(300)] for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]
    assert len(ours.explain()) == 256
    reads = [[ours.decide_read(f"s{number}", tail((STORE, 50)), Action.COMPUTE) for number in range(300)] for _ in "12"]
    assert reads[0] == reads[1]
    for number in range(300):
        ours.record_computed(f"r{number}", {})
        ours.record_computed(f"s{number}", {})
    assert (ours.num_moved, ours.num_computed) == (300, 300)


def test_plans_when_a_waiting_request_is_planned_anew_then_the_last_one_counts_once():
    ours = planner(rates_of(PEER=1.0), min_pages=10)
    for num_found in (9, 10, 11, 12):
        ours.decide("moved", tail((PEER, num_found)))
    for num_found in (12, 11, 9):
        ours.decide("computed", tail((PEER, num_found)))
    assert (ours.num_moved, ours.num_computed) == (0, 0)
    for request in ("moved", "computed"):
        ours.record_computed(request, {})
    assert (ours.num_moved, ours.num_computed) == (1, 1)


@pytest.mark.parametrize(("num_kinds", "lengths"), [(1, range(1, 200)), (2, (0, 200))])
def test_plan_when_pages_are_of_two_kinds_then_all_that_can_be_restored_is_moved_or_nothing(num_kinds, lengths):
    """A cut would end where there is no window, or no state: nothing of it would be moved."""
    for per_token_us in (95.0, 100.0, 105.0):
        ours = planner(rates_of(PEER=per_token_us, STORE=per_token_us), num_kinds=num_kinds)
        assert ours.decide("r", tail((PEER, 200))).num_pages in lengths
        assert ours.decide("s", tail((PEER, 100), (STORE, 100))).num_pages in lengths
        assert ours.decide_read("t", tail((STORE, 200))).num_pages in lengths


def test_plan_when_a_request_is_forgotten_then_it_is_still_told_of_and_another_of_its_name_is_planned_for_itself():
    rates = rates_of(PEER=1.0)
    ours, found = planner(rates, min_pages=50), tail((PEER, 50))
    ours.decide("r", found)
    ours.forget("r")
    ours.record("r", Outcome.LANDED)
    assert [(one["rid"], one["outcome"]) for one in ours.explain()] == [("r", "landed")]
    assert ours.decide("r", found, Action.COMPUTE).num_pages == 0


def test_plan_when_estimates_wobble_around_a_tie_then_decisions_do_not_flap():
    rng = random.Random(1)
    rates, times = MoveRates(), PrefillTimes(COST)
    ours = planner(rates, times=times, min_pages=40)
    even_us = COST.time_us([(40 * PAGE + 8, 0)]) / (40 * PAGE)
    choices = []
    for number in range(300):
        rates.observe(PEER, 40 * PAGE, 40 * PAGE * even_us * rng.uniform(0.8, 1.2))
        times.observe(ForwardSample(((648, 0),), COST.time_us([(648, 0)]) * rng.uniform(0.9, 1.1)))
        choices.append(ours.decide(f"r{number}", tail((PEER, 40))).num_pages > 0)
    flips = sum(one != other for one, other in pairwise(choices[20:]))
    assert flips <= 2


def test_plan_when_a_slow_source_has_become_fast_then_a_trial_finds_out():
    rates = rates_of(STORE=120.0)
    # min_pages forbids the cut, so it is all or nothing.
    ours = planner(rates, min_pages=50)
    reasons = []
    for number in range(200):
        plan = ours.decide(f"r{number}", tail((STORE, 50)))
        reasons.append(plan.reason)
        if plan.num_pages:
            rates.observe(STORE, 50 * PAGE, 50 * PAGE * 1.0)
    assert reasons.count(PlanReason.TRIAL) >= 1
    assert reasons[0] is PlanReason.FASTER
    assert plan.num_pages == 50, "the last decisions move again"


@pytest.mark.parametrize("num_slow", [6, 20])
@pytest.mark.parametrize("kind", [PEER, STORE])
def test_plan_when_long_moves_were_slow_for_a_while_then_as_much_is_moved_again(kind, num_slow):
    """Shorter moves, which were not measured then, would take their place for ever."""
    rates = rates_of(**{kind.name: 10.0})
    ours, found = planner(rates), tail((kind, 256))
    usual = planner(rates).decide_read("r", found).num_pages
    plans = []
    for number in range(800):
        plan = ours.decide_read(f"r{number}", found)
        plans.append(plan)
        if plan.num_pages:
            per_token_us = 1000.0 if number < num_slow else 10.0
            rates.observe(kind, plan.num_pages * PAGE, plan.num_pages * PAGE * per_token_us)
    assert min(plan.num_pages for plan in plans) <= 0.6 * usual
    assert plans[-1].num_pages == usual


@pytest.mark.parametrize("min_pages", [1, 50])
def test_plan_when_a_source_is_hopeless_then_all_trials_together_cost_a_64th_of_computing(min_pages):
    ours = planner(rates_of(STORE=1000.0), min_pages=min_pages)
    plans = [ours.decide(f"r{number}", tail((STORE, 50))) for number in range(3000)]
    trials = [plan for plan in plans if plan.reason is PlanReason.TRIAL]
    assert 1 <= len(trials) <= 6, "of 20 times what computing takes"
    assert all(plan.num_pages == 0 for plan in plans if plan.reason is not PlanReason.TRIAL)


kinds = st.sampled_from([PEER, HOST, STORE])


def tails_up_to(max_run_pages):
    return st.builds(
        lambda runs, own, new: tail(*runs, own=own * PAGE, new=new),
        st.lists(st.tuples(kinds, st.integers(1, max_run_pages)), min_size=1, max_size=4),
        st.integers(0, 500),
        st.integers(1, 2000),
    )


tails, short_tails = tails_up_to(300), tails_up_to(40)
noisy = st.lists(st.tuples(kinds, st.integers(1, 5000), st.floats(0.01, 500.0)), max_size=40)


@given(st.lists(tails, min_size=1, max_size=8), noisy, st.lists(st.floats(0.3, 3.0), max_size=20))
def test_plan_when_anything_was_measured_then_never_worse_than_recomputing_by_more_than_the_error(
    asked, moves, factors
):
    rates, times = MoveRates(), PrefillTimes(COST)
    for kind, num_tokens, per_token_us in moves:
        rates.observe(kind, num_tokens, per_token_us * num_tokens)
    for factor in factors:
        times.observe(ForwardSample(((500, 100),), COST.time_us([(500, 100)]) * factor))
    ours = planner(rates, times=times)
    for number, one in enumerate(asked):
        plan = ours.decide(str(number), one)
        assert 0 <= plan.num_pages <= one.num_found
        num_left = one.prompt_tokens - one.own_tokens - plan.num_pages * PAGE
        assert plan.num_pages == 0 or num_left != 1
        assert plan.reason is not PlanReason.LONE_TOKEN or num_left == PAGE + 1
        if plan.best is None or plan.recompute is None or plan.reason is PlanReason.TRIAL:
            continue
        num_chosen = plan.num_pages + (plan.reason is PlanReason.LONE_TOKEN)
        chosen, other = (plan.best, plan.recompute) if num_chosen else (plan.recompute, plan.best)
        assert chosen.total_us <= other.total_us + plan.best.error_us + 1e-6


def test_best_when_a_free_page_lies_behind_a_slow_run_then_the_cut_within_that_run_is_still_found():
    one = tail((PEER, 40), (HOST, 1), new=1)
    pricing = Pricing(times=PrefillTimes(COST), rates=rates_of(PEER=20.0, HOST=1.0), num_layers=LAYERS)
    assert 30 < pricing.best(one, pricing.recompute(one), min_pages=1).num_pages < 40


@settings(max_examples=examples(30))
@given(short_tails, st.floats(0.01, 300.0))
def test_best_when_every_number_of_pages_is_tried_then_the_cut_is_within_a_tenth_of_the_best(one, per_token_us):
    pricing = Pricing(
        times=PrefillTimes(COST), rates=rates_of(PEER=per_token_us, HOST=1.0, STORE=per_token_us), num_layers=LAYERS
    )
    recompute = pricing.recompute(one)
    best = pricing.best(one, recompute, min_pages=1)
    every = min(pricing.estimate(one, num_pages, recompute).total_us for num_pages in range(1, one.num_found + 1))
    assert every <= best.total_us <= 1.1 * every


DEAR = PrefillCost(fixed_us=20_000.0, token_us=50.0, pair_us=0.003, context_us=0.5, masked_us=0.003)


def in_chunks_us(one, num_pages, *, chunk, per_token_us, num_in_step):
    """What the plan that moves so many pages takes, forward by forward."""
    at = one.own_tokens + min(num_pages * PAGE, one.prompt_tokens - 1 - one.own_tokens)
    waits_us, taken_us = num_pages * PAGE * per_token_us, 0.0
    while at < one.prompt_tokens:
        size = min(chunk, one.prompt_tokens - at)
        forward_us = DEAR.time_us([(size, at)])
        alone_us = (waits_us + max(waits_us, forward_us) * (LAYERS - 1) + forward_us) / LAYERS
        taken_us += forward_us + num_in_step * (alone_us - forward_us)
        at, waits_us = at + size, 0.0
    return taken_us


@pytest.mark.parametrize("per_token_us", [5.0, 40.0, 90.0, 300.0, 1000.0])
@pytest.mark.parametrize("chunk", [512, 2048, 8192])
def test_plan_when_prompts_are_computed_in_chunks_then_only_the_first_hides_a_move(chunk, per_token_us):
    rates = rates_of(PEER=per_token_us)
    for num_pages, own, new, num_in_step in product((16, 128, 512, 2048), (0, 4096), (8, 3000), (1, 8)):
        times, one = PrefillTimes(DEAR, chunk_tokens=chunk), tail((PEER, num_pages), own=own, new=new)
        plan = planner(rates, times=times, num_in_step=num_in_step).decide("r", one)
        cost_us = partial(in_chunks_us, one, chunk=chunk, per_token_us=per_token_us, num_in_step=num_in_step)
        taken_us = cost_us(plan.num_pages)
        assert (plan.best if plan.num_pages else plan.recompute).total_us == pytest.approx(taken_us)
        assert taken_us <= 1.000001 * min(cost_us(0), cost_us(num_pages))


@pytest.mark.parametrize("num_pages, is_moved", [(10, False), (100, True)])
def test_plan_when_a_move_brings_a_state_then_it_pays_above_some_length_only(num_pages, is_moved):
    one = tail((PEER, num_pages), new=1)
    assert planner(rates_of(PEER=20.0)).decide("r", one).num_pages > 0
    stateful = planner(rates_of(PEER=20.0), fixed_tokens=4000.4)
    plan = stateful.decide("r", one)
    assert (plan.num_pages > 0) == is_moved
    # As many tokens more as weigh the same, once for each move.
    assert plan.best.move_us == pytest.approx((plan.best.num_pages * one.page_tokens + 4000) * 20.0)


def test_share_when_a_move_brings_a_state_then_that_is_charged_too():
    plain, stateful = (
        Pricing(times=PrefillTimes(COST), rates=rates_of(PEER=20.0), num_layers=LAYERS, fixed_tokens=fixed)
        for fixed in (0.0, 512.0)
    )
    assert stateful.move_share(SourceKind.PEER, 512) == pytest.approx(2 * plain.move_share(SourceKind.PEER, 512))


def test_explain_when_a_decision_was_made_then_its_figures_and_outcome_are_plain_values():
    ours = planner(rates_of(PEER=1.0))
    ours.decide("r", tail((PEER, 10), own=32))
    ours.record("r", Outcome.LANDED)
    ours.record("gone", Outcome.LANDED)
    (one,) = json.loads(json.dumps(ours.explain()))
    assert one["rid"] == "r" and one["outcome"] == "landed"
    assert (one["own_tokens"], one["found"], one["moved_pages"]) == (32, [["peer", 10]], 10)
    assert one["expected_us"] < one["recompute_us"]


def test_explain_when_many_requests_were_decided_then_only_the_last_are_remembered(monkeypatch):
    monkeypatch.setattr("banyan.planner.planner.MAX_DECISIONS", 3)
    ours = planner(rates_of(PEER=1.0))
    for number in range(10):
        ours.decide(f"r{number}", tail((PEER, 10)))
    assert [one["rid"] for one in ours.explain()] == ["r7", "r8", "r9"]


def test_read_when_a_part_of_it_is_worth_it_then_that_part_is_moved_whole():
    decides = planner(rates_of(STORE=100.0))
    num_read = decides.decide_read("r", tail((STORE, 200))).num_pages
    assert 0 < num_read < 200
    arrived = tail((STORE, num_read), new=8 + (200 - num_read) * PAGE)
    assert decides.decide("r", arrived).num_pages == num_read
    decides.record_computed("r", {})
    assert (decides.num_moved, decides.num_computed) == (1, 0)


def test_read_when_it_is_not_worth_it_then_the_request_is_explained_by_that():
    decides = planner(rates_of(STORE=5000.0))
    asked = tail((STORE, 20))
    assert decides.decide_read("r", asked).num_pages == 0
    assert decides.decide_read("r", asked).num_pages == 0, "asked once more on the next pass"
    nothing = tail(new=20 * PAGE + 8)
    assert decides.decide("r", nothing).reason is PlanReason.NOTHING_FOUND
    (explained,) = decides.explain()
    assert explained["found"] == [["storage", 20]] and explained["moved_pages"] == 0
    decides.record_computed("r", {})
    assert (decides.num_moved, decides.num_computed) == (0, 1)


def test_read_when_it_is_a_trial_then_what_comes_is_moved():
    decides = planner(rates_of(STORE=120.0), min_pages=50)
    slow = tail((STORE, 50))
    plans = [decides.decide_read(f"r{number}", slow) for number in range(200)]
    trials = [number for number, plan in enumerate(plans) if plan.reason is PlanReason.TRIAL]
    assert trials and plans[trials[0]].num_pages == 50
    assert decides.decide(f"r{trials[0]}", slow).num_pages == 50
    assert decides.decide("another", slow).num_pages == 0


def test_read_when_the_store_was_slow_once_and_reads_end_before_their_turn_then_a_trial_still_finds_out():
    """What has been read by then is moved from the arena: no copy tells how fast the store is."""
    rates = rates_of(STORE=120.0)
    # min_pages forbids the cut, so it is all or nothing.
    ours, plans = planner(rates, min_pages=50), []
    for number in range(200):
        plans.append(ours.decide_read(f"r{number}", tail((STORE, 50))))
        if plans[-1].num_pages:
            rates.observe_at_most(STORE, 50 * PAGE, 50 * PAGE * 1.0)
    assert [plan.reason for plan in plans].count(PlanReason.TRIAL) == 1
    assert (plans[0].num_pages, plans[-1].num_pages) == (0, 50)


def test_plan_when_pages_come_from_the_store_then_no_cut_within_them():
    """What is on its way comes layer by layer, all pages of a layer together: a part would take as long."""
    decides = planner(rates_of(PEER=100.0, STORE=100.0))
    assert decides.decide("r", tail((STORE, 200))).num_pages in (0, 200)
    num_pages = decides.decide("s", tail((PEER, 100), (STORE, 100))).num_pages
    assert 0 < num_pages <= 100 or num_pages == 200


@pytest.mark.parametrize(("action", "num_pages"), [(Action.MOVE, 20), (Action.COMPUTE, 0)])
def test_read_when_the_client_asks_then_as_asked(action, num_pages):
    assert planner(rates_of(STORE=5000.0)).decide_read("r", tail((STORE, 20)), action).num_pages == num_pages


def test_plan_when_the_rest_is_expected_to_take_no_time_then_what_was_found_is_moved():
    """Weights fitted to a few forwards may say so of a short rest."""
    times = SimpleNamespace(expected=lambda piece: (0.0, 0.0, 0.0) if piece[0] <= 16 else (1000.0, 10.0, 1000.0))
    rates = MoveRates()
    rates.observe(SourceKind.PEER, 160, 10.0)
    planner = Planner(Pricing(times=times, rates=rates, num_layers=30), min_pages=1)
    found = Tail(own_tokens=0, prompt_tokens=176, page_tokens=16, runs=(Run(SourceKind.PEER, 10),))
    assert planner.decide("r", found).num_pages == 10


def test_why_when_what_was_found_is_not_moved_then_the_plan_says_why_or_it_was_refused():
    dear, cheap = rates_of(PEER=100_000.0), rates_of(PEER=1.0)
    assert planner(cheap).why_unmoved("unknown") == (0, Why.REFUSED)
    for made, planned_tokens, why in (
        (planner(dear), 32, Why.CHEAPER),
        (planner(cheap, min_pages=200), 32, Why.SHORT),
        (planner(cheap), 1632, Why.REFUSED),
    ):
        made.decide("r", tail((PEER, 100), own=32))
        assert made.why_unmoved("r") == (planned_tokens, why)


@pytest.mark.parametrize("num_found", [1, 50])
def test_plan_when_one_token_would_be_left_then_a_page_less_is_planned_told_and_counted(num_found):
    made = planner(rates_of(PEER=1.0))
    plan = made.decide("r", tail((PEER, num_found), new=1))
    assert (plan.num_pages, plan.reason) == (num_found - 1, PlanReason.LONE_TOKEN)
    assert made.explain()[0]["moved_pages"] == num_found - 1
    assert made.why_unmoved("r") == ((num_found - 1) * PAGE, Why.TAIL)
    made.record_computed("r", {})
    assert (made.num_moved, made.num_computed) == ((1, 0) if num_found > 1 else (0, 1))
    assert made.decide("s", tail((PEER, num_found), new=2)).num_pages == num_found


def test_decision_when_it_is_refused_then_the_cause_and_what_was_computed_are_told():
    made = planner(rates_of(PEER=1.0))
    made.decide("r", tail((PEER, 100)))
    made.record_refused("r", Refusal.IN_FLIGHT_READ)
    made.record_computed("r", {Why.REFUSED: 1600, Why.TAIL: 8})
    (told,) = made.explain()
    assert told["outcome"] == "refused: what was on its way did not come"
    assert told["computed"] == {"refused": 1600, "tail": 8}
    made.record_refused("unknown", Refusal.LEASE)
    made.record_computed("unknown", {})
