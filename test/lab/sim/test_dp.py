# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from banyan.arena.residency import Residency
from banyan.core import SourceKind
from banyan.planner import Planner
from banyan.routing import POLICIES, Dispatcher
from banyan.sglang_plugin.pools.reserve import reserve_for
from banyan_lab.replay import Skew, Trace, TraceError, TraceRequest, skewed_trace
from banyan_lab.sim import dp, dp_rank
from banyan_lab.sim.caches import Arena, Pool
from banyan_lab.sim.dp_node import DpNode
from banyan_lab.sim.engine import Simulation

CHATS = Skew(
    num_sessions=60, num_turns=5, hot_ratio=0.3, num_cold_prefixes=10, prefix_blocks=32, turn_blocks=24,
    block_tokens=64, num_output_tokens=100, gap_s=0.3, think_s=5.0,
)  # fmt: skip


def served(policy="round_robin", **options):
    return dp.serve(skewed_trace(CHATS), dp.site(block_tokens=64, **options), policy)


def test_pool_when_full_then_the_longest_unused_goes_and_leaves_before_parents():
    pool = Pool(4)
    pool.insert(["a", "b", "c"])
    pool.insert(["a", "x", "y"])
    assert "c" not in pool and pool.num_free == 1, "what was one node goes as a whole"
    assert pool.prefix(["a", "b", "c"]) == 1 and pool.prefix(["a", "x", "y"]) == 3


def test_pool_when_losses_are_told_then_the_least_goes_first():
    pool = Pool(6, lambda page, chance: (SourceKind.PEER, 0.1) if page == "y" else (None, 1.0))
    for prompt in (["a", "b", "c"], ["x", "y"]):
        pool.asked(prompt, "a prompt")
        pool.served("a prompt")
        pool.insert(prompt)
    pool.insert(["p", "q"])
    assert pool.prefix(["x", "y"]) == 0 and pool.prefix(["a", "b", "c"]) == 3


@pytest.mark.parametrize("pool_tokens", [48_000, 400_000])
def test_site_when_ranks_share_then_their_pools_hold_less_by_what_is_kept_evicted_on_a_gpu(pool_tokens):
    site = dataclasses.replace(dp.site(block_tokens=64, shares=True), pool_tokens=pool_tokens)
    chunk = dp_rank.CHUNK_TOKENS
    reserve = reserve_for(chunked_prefill_tokens=chunk, max_prefill_tokens=chunk, pool_tokens=pool_tokens)
    assert site.reserve_tokens == reserve.tokens_to_have(0, available=0) > 0
    assert dataclasses.replace(site, shares=False).reserve_tokens == 0
    sim, more = Simulation(), [str(n) for n in range(pool_tokens // 64)]
    rank = DpNode(sim, site, POLICIES["level"](), done=print_nothing)._ranks[0]
    rank.pool.insert(more)
    assert rank.pool.prefix(more) == (pool_tokens - site.reserve_tokens) // 64


def test_site_when_a_block_fits_into_a_pool_but_not_beside_the_reserve_then_nothing_of_the_trace_fits():
    site = dataclasses.replace(dp.site(block_tokens=64, shares=True), page_tokens=900, pool_tokens=1_000)
    with pytest.raises(TraceError, match="no block"):
        dp.Run(site, "level")


def test_arena_when_full_then_who_was_asked_for_stays():
    arena = Arena(4)
    arena.insert(["a", "b"])
    arena.insert(["c", "d"])
    assert arena.prefix(["a", "b"], 0) == 2
    arena.insert(["e", "f"])
    assert arena.prefix(["a", "b"], 0) == 2 and arena.prefix(["c", "d"], 0) == 0


def test_sharing_when_on_then_requests_that_move_find_their_prefix():
    off, on = served(shares=False), served(shares=True)
    assert off.moved_share == 0 < on.moved_share
    assert on.hit_share > off.hit_share + 0.3 and on.mean_ttft_s < off.mean_ttft_s


def test_policies_when_nothing_is_shared_then_affinity_finds_more_than_round_robin():
    assert served("session_sticky", shares=False).hit_share > served("round_robin", shares=False).hit_share + 0.3


def answer_s(*, num_decode_only, other):
    """How long 200 tokens take on a rank that gets another prompt of 20,000 tokens meanwhile, or does not."""
    sim, ended = Simulation(), {}
    here = dp.site(block_tokens=64, shares=True, num_decode_only=num_decode_only)
    node = DpNode(sim, here, POLICIES["session_sticky"](), done=lambda r, now_s: ended.setdefault(r.number, now_s))
    node.submit("s", ["a"], 100, 200)
    if other:
        sim.at(0.1, node.submit, "s", ["b"], 20_000, 1)
    sim.run()
    return ended[0]


def test_node_when_a_rank_prefills_then_its_decode_steps_wait_and_those_of_decode_ranks_do_not():
    """Three chunks, each followed by a step: the answer comes later by the prefill, and a step counts once."""
    prefill = dp.site(block_tokens=64, shares=True).prefill
    work_s = prefill.linear_s(20_000) + prefill.attention_s(new_tokens=20_000, cached_tokens=0)
    late_s = answer_s(num_decode_only=0, other=True) - answer_s(num_decode_only=0, other=False)
    assert late_s == pytest.approx(work_s)
    assert answer_s(num_decode_only=4, other=True) == pytest.approx(answer_s(num_decode_only=4, other=False))


def test_node_when_a_request_is_alone_then_its_time_is_its_work():
    sim, ended = Simulation(), []
    here = dp.site(block_tokens=64, shares=True)
    node = DpNode(sim, here, POLICIES["unified"](), done=lambda request, now_s: ended.append((request, now_s)))
    node.submit("s", [str(n) for n in range(64)], 64 * 64, 11)
    sim.run()
    (request, now_s) = ended[0]
    work_s = here.prefill.linear_s(4096) + here.prefill.attention_s(new_tokens=4096, cached_tokens=0)
    assert request.prefilled_s == pytest.approx(work_s)
    step_s = here.decode.step_s(num_requests=1, context_tokens=4096 + 5)
    assert now_s - work_s == pytest.approx(10 * step_s)


def test_node_when_seeded_alike_then_the_same_to_the_last_bit():
    assert repr(dataclasses.astuple(served("unified", shares=True))) == repr(
        dataclasses.astuple(served("unified", shares=True))
    )


@pytest.mark.parametrize(("owner", "name"), [(Planner, "decide"), (Dispatcher, "place"), (Residency, "frame")])
def test_node_when_code_that_servers_call_is_taken_away_then_it_stops(monkeypatch, owner, name):
    class Asked(Exception):
        pass

    def ask(*args, **kwargs):
        raise Asked

    monkeypatch.setattr(owner, name, ask)
    with pytest.raises(Asked):
        served(shares=True, arena=True)


def test_arena_when_the_claims_of_servers_are_taken_away_then_it_has_no_frames(monkeypatch):
    monkeypatch.setattr(Residency, "claim", lambda residency, num_frames: [])
    arena = Arena(4)
    arena.insert(["a"])
    assert arena.prefix(["a"], 0) == 0


def test_node_when_tokens_come_from_somewhere_then_they_are_counted_by_source():
    sim = Simulation()
    node = DpNode(sim, dp.site(block_tokens=64, shares=True, arena=True), POLICIES["round_robin"](), done=print_nothing)
    pages = [str(n) for n in range(64)]
    for number in range(3):
        sim.at(10.0 * number, node.submit, f"s{number}", pages, 4096, 4)
    sim.run()
    assert node.tokens_from[SourceKind.PEER] + node.tokens_from[SourceKind.OWN] >= 2 * 4096 - 2


def test_node_when_a_page_leaves_the_last_pool_that_has_it_then_the_arena_has_it_and_not_before():
    """Write-back, as servers: two ranks have a prompt, then each needs the room for another one."""
    sim, backed_up = Simulation(), []
    here = dp.site(block_tokens=64, shares=True, arena=True)
    here = dataclasses.replace(here, num_ranks=2, pool_tokens=80 * 64)
    node = DpNode(sim, here, POLICIES["round_robin"](), done=print_nothing)
    one, two, three = ([f"{prompt}/{n}" for n in range(64)] for prompt in range(3))
    for number, pages in enumerate((one, one, two, three)):
        sim.at(10.0 * number, node.submit, f"s{number}", pages, 4096 + 8, 4)
        sim.at(10.0 * number + 9, lambda: backed_up.append(node._arena.prefix(one, 0)))
    sim.run()
    assert backed_up == [0, 0, 0, 64]


def test_node_when_ranks_fetch_then_only_what_they_will_compute_is_told_to_wait():
    sim, told = Simulation(), []
    node = DpNode(sim, dp.site(block_tokens=64, shares=True), POLICIES["round_robin"](), done=print_nothing)
    pages = [str(n) for n in range(64)]
    sim.at(0.0, node.submit, "first", pages, 4096 + 8, 4)
    for number in range(20):
        sim.at(10.0, node.submit, f"s{number}", pages, 4096 + 8, 4)
    sim.at(10.0, lambda: told.append(node.pending_tokens))
    sim.run()
    # One is prefilled at each rank, the others wait.
    assert told == [8 * (20 - 8)] and node.pending_tokens == 0


def test_node_when_a_prompt_is_longer_than_a_chunk_then_what_is_behind_it_is_told_to_wait():
    sim, told = Simulation(), set()
    node = DpNode(sim, dp.site(block_tokens=64, shares=True), POLICIES["round_robin"](), done=print_nothing)
    node.submit("s", ["a"], 20_000, 1)
    for number in range(2_000):
        sim.at(number / 1_000, lambda: told.add((node.pending_tokens, node.computed_tokens)))
    sim.run()
    assert told == {(20_000 - 8_192, 8_192), (20_000 - 16_384, 16_384), (0, 20_000)}


def test_node_when_one_prompt_comes_twice_at_once_then_the_second_goes_where_the_first_is_awaited():
    """Nobody holds a page yet: only what the shipped dispatcher knows of prompts on their way can tell."""
    sim, ended = Simulation(), []
    node = DpNode(
        sim, dp.site(block_tokens=64, shares=False), POLICIES["affinity"](), done=lambda r, _: ended.append(r)
    )
    pages = [str(n) for n in range(64)]
    for number in range(2):
        sim.at(0.001 * number, node.submit, f"s{number}", pages, 4096, 4)
    sim.run()
    assert ended[0].decode_rank is ended[1].decode_rank


@pytest.mark.parametrize(
    ("block_tokens", "requests"),
    [(64, ()), (64, (TraceRequest("s", 0, 0.0, 10_000_000, 1),)), (10_000_000, (TraceRequest("s", 0, 0.0, 9, 1),))],
)
def test_run_when_nothing_of_a_trace_fits_then_said(block_tokens, requests):
    with pytest.raises(TraceError, match="fits into a pool"):
        dp.serve(Trace("t", block_tokens, requests), dp.site(block_tokens=block_tokens, shares=True), "unified")


def test_run_when_a_log_does_not_begin_at_its_first_line_then_at_its_earliest():
    asked = [TraceRequest(f"s{at}", 0, float(at), 640, 4) for at in (-20, 0, 30)]
    here = dp.site(block_tokens=64, shares=True)
    later = [dataclasses.replace(request, at_s=request.at_s + 20) for request in asked]
    first, second = (dp.serve(Trace("t", 64, tuple(some)), here, "unified") for some in (asked, later))
    assert first == second


def test_run_when_one_block_comes_behind_several_others_then_it_is_a_page_of_its_own_behind_each(monkeypatch):
    """A pool's page has one parent: pages of one name behind two others spoil the count of its children."""
    submitted = []
    monkeypatch.setattr(DpNode, "submit", lambda self, session, pages, *_: submitted.append(pages) or len(submitted))
    run = dp.Run(dp.site(block_tokens=64, shares=True), "unified")
    for scope, blocks in (("x", (1, 2, 1)), ("x", (1, 2, 1)), ("x", (2, 1)), ("y", (1, 2))):
        asked = TraceRequest("s", 0, 0.0, 64 * len(blocks), 4, tuple((block, 1) for block in blocks), scope)
        run.submit(Trace("t", 64, ()), asked)
    first, _, other_order, other_scope = map(set, submitted)
    assert len(first) == 3 and submitted[0] == submitted[1]
    assert not first & other_order and not first & other_scope and not other_order & other_scope


def print_nothing(request, now_s):
    del request, now_s
