# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import math
from dataclasses import asdict, replace

import pytest
from test.unit.observe.fake_banyan import NOW_S, FakeBanyan

from banyan.observe import Rates, Reading
from banyan.observe.prefix_tree import MAX_LEVELS, prefix_tree
from banyan.observe.reading import SeenPrompt
from banyan.observe.summary import summary

URL = "http://a"


def read(server, taken_s=None):
    return Reading.of(URL, server.now_s if taken_s is None else taken_s, server.info(), server.loads())


def test_reading_when_no_rank_runs_banyan_then_it_is_said_what_to_do():
    server = FakeBanyan()
    server.banyan = False
    with pytest.raises(ValueError, match="http://a runs without Banyan: start it with --enable-banyan"):
        read(server)


BEYOND = {"dp_rank": 0, "page_tokens": 16, "prompt_tokens": 10**400}


@pytest.mark.parametrize(
    "info",
    [
        {"internal_states": [{"banyan": {"dp_rank": "x"}}]},
        {"internal_states": [{"banyan": BEYOND}]},
        {"internal_states": [{"banyan": {"dp_rank": 0, "page_tokens": 16, "rid_nonce": "another release's"}}]},
        {"internal_states": 7},
    ],
)
def test_reading_when_the_answer_is_another_servers_then_it_is_said(info):
    with pytest.raises(ValueError, match="is not as Banyan's ranks answer"):
        Reading.of(URL, NOW_S, info, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(("up_s", "prompt_tokens", "num_pool_pages"), (math.nan, math.inf, -math.inf, 1e300)),
        ("up_s", "nan"),
        ("num_pool_pages", "inf"),
    ],
)
def test_reading_when_a_figure_is_none_or_endless_then_it_is_said(name, value):
    info = FakeBanyan(num_ranks=1).info()
    info["internal_states"][0]["banyan"][name] = value
    with pytest.raises(ValueError, match="is no figure of a rank's"):
        Reading.of(URL, NOW_S, info, None)


def test_reading_when_a_rank_has_shards_then_the_first_stands_for_it_and_loads_may_be_missing():
    server = FakeBanyan(num_ranks=2)
    info = server.info()
    second = {**info["internal_states"][0]["banyan"], "shard": 1, "lookups": 99}
    info["internal_states"].insert(0, {"banyan": second})
    reading = Reading.of(URL, NOW_S, info, None)
    assert [rank.dp_rank for rank in reading.ranks] == [0, 1]
    assert reading.ranks[0].value("lookups") == 0 and reading.ranks[0].num_running is None


def test_rates_when_there_are_two_readings_then_what_lies_between_counts():
    server = FakeBanyan(num_ranks=1)
    server.step()
    before = read(server, 100.0)
    server.step()
    # Whoever looks has set his clock back meanwhile; the rank's has gone on.
    rates = Rates(read(server, 50.0), before)
    (rank,) = rates.now.ranks
    assert rates.per_s(rank, "lookups") == 5 / 2 and not rates.is_since_start
    alone = Rates(rates.now)
    assert alone.per_s(rank, "lookups") == pytest.approx(10 / server.up_s) and alone.is_since_start


def test_rates_when_the_server_has_started_anew_and_is_older_than_before_then_it_counts_from_its_start():
    server = FakeBanyan(num_ranks=1)
    server.step()
    before = read(server, 100.0)
    again = FakeBanyan(num_ranks=1)
    again.up_s, again.counters[0].lookups = server.up_s + 5, 1
    now = read(again, 100.0 + 2 * again.up_s)
    now = replace(now, ranks=tuple(replace(rank, rid_nonce="another") for rank in now.ranks))
    (rank,) = now.ranks
    assert Rates(now, before).grown(rank, "lookups") == 1
    assert Rates(now, before).seconds(rank) == again.up_s


def test_rates_when_the_server_has_started_anew_then_no_figure_is_negative():
    server = FakeBanyan(num_ranks=1)
    server.step()
    before = read(server, 100.0)
    again = FakeBanyan(num_ranks=1)
    again.up_s = 2.0
    again.counters[0].lookups = 1
    rates = Rates(read(again, 104.0), before)
    assert rates.total_per_s("lookups") == 0.5


def test_ceiling_when_ranks_have_heard_less_or_are_on_other_nodes_then_it_is_that_of_all_prompts():
    server = FakeBanyan(num_ranks=3)
    for more, (node, heard, share) in zip(server.more, ((0, 1_000, 0.4), (0, 100, 0.9), (1, 500, 0.1)), strict=True):
        more |= {"layout": {"node": node}, "heard_tokens_1h": heard, "hit_ceiling_1h": share}
        more |= {"heard_tokens_24h": 4_000 - heard, "hit_share_half": share}
    told = summary(Rates(read(server)))["ceiling"]
    assert told["1h"] == pytest.approx((1_000 * 0.4 + 500 * 0.1) / 1_500)
    assert told["half"] == pytest.approx((3_900 * 0.9 + 3_500 * 0.1) / 7_400)


def test_summary_when_prompts_were_answered_then_hits_and_computed_are_all_tokens():
    server = FakeBanyan()
    for _ in range(3):
        server.step()
    told = summary(Rates(read(server)))
    assert sum(told["hits"].values()) == sum(one.prompt_tokens for one in server.counters)
    assert told["hits"]["peer"] == sum(one.peer_tokens for one in server.counters)
    assert told["distinct_share"] == pytest.approx(0.9)
    assert told["store"]["num_records"] == 1204 and told["store"]["allowed_bytes_per_day"] == 50 << 30
    assert summary(Rates(read(FakeBanyan(store=False))))["store"] is None


@pytest.mark.parametrize(("part", "most"), [("prompts", 32), ("plans", 256), ("changing_lines", 8)])
def test_reading_when_a_rank_tells_more_than_ours_do_then_it_is_not_read_and_it_is_said(part, most):
    info = FakeBanyan(num_ranks=1).info()
    info["internal_states"][0]["banyan"][part] = [None] * (most + 1)
    with pytest.raises(ValueError, match=f"{most + 1} of what there are {most} at most"):
        Reading.of(URL, NOW_S, info, None)


def test_reading_when_a_decision_has_more_than_ours_do_then_that_is_left_out():
    """It would go to whoever looks at the page, as large and as deep as a server likes."""
    info = FakeBanyan(num_ranks=1).info()
    (plan, *_) = info["internal_states"][0]["banyan"]["plans"]
    info["internal_states"][0]["banyan"]["plans"] = [{**plan, "more": [[[]]]}]
    (rank,) = Reading.of(URL, NOW_S, info, None).ranks
    ((told),) = rank.plans
    assert told == {"dp_rank": 0, **plan}


def test_reading_when_a_server_has_more_ranks_than_any_then_they_are_not_read_and_it_is_said():
    with pytest.raises(ValueError, match="1025 of what there are 1024 at most"):
        Reading.of(URL, NOW_S, {"internal_states": [{"banyan": {"dp_rank": rank}} for rank in range(1025)]}, None)


def told_prompt(*marks):
    return {"rid": "r", "num_turns": 1, "seen_s": 0, "marks": marks, "pools": [], "arena": 0}


@pytest.mark.parametrize("places", [(), (0,), (-16, 16), (32, 16)])
def test_reading_when_a_prompts_marks_do_not_rise_from_its_first_token_then_it_is_said(places):
    with pytest.raises(ValueError, match="marks do not rise"):
        SeenPrompt.of(told_prompt(*([place, "k"] for place in places)))


def test_tree_when_prompts_share_their_beginning_then_it_is_one_branch_and_says_who_holds_it():
    server = FakeBanyan()
    tree = prefix_tree(read(server))
    shared, other = tree
    assert (shared.start_tokens, shared.end_tokens, shared.num_prompts) == (0, 320, 9)
    assert [child.num_prompts for child in shared.children] and sum(b.num_prompts for b in shared.children) == 9
    assert shared.pools == [320, 320] and shared.arena == 320
    assert (other.end_tokens, other.pools, other.children) == (480, [480, 0], [])


def test_tree_when_ranks_are_on_other_nodes_then_what_each_holds_is_its_own():
    """A node tells of its own ranks: of those before them nothing."""
    info = FakeBanyan(num_ranks=2).info()
    for state, pools in zip(info["internal_states"], ([32, 16], [0, 0, 16, 32]), strict=True):
        state["banyan"]["prompts"] = [{**told_prompt([16, "a"], [32, "b"]), "pools": pools}]
    (branch,) = prefix_tree(Reading.of(URL, NOW_S, info, None))
    assert branch.pools == [32, 16, 16, 32]


def test_tree_when_prompts_are_nested_deeper_than_calls_go_then_the_first_levels_are_there():
    info = FakeBanyan(num_ranks=20).info()
    for rank, state in enumerate(info["internal_states"]):
        ends = range(rank * 32 + 1, rank * 32 + 33)
        state["banyan"]["prompts"] = [told_prompt(*([page * 16, page] for page in range(1, end + 1))) for end in ends]
    (branch,) = prefix_tree(Reading.of(URL, NOW_S, info, None))
    assert (branch.num_prompts, branch.end_tokens, len(list(walk([branch])))) == (640, 16, MAX_LEVELS)
    json.dumps(asdict(branch))


def walk(branches):
    for branch in branches:
        yield branch
        yield from walk(branch.children)


@pytest.mark.parametrize("seed", range(20))
def test_tree_when_prompts_are_any_then_every_prompt_ends_once_and_children_go_on_where_parents_end(seed):
    server = FakeBanyan(num_ranks=3, seed=seed)
    for number in range(40):
        length = server.rng.randrange(1, 400)
        parts_at = server.rng.randrange(0, length)
        names = [*range(parts_at), *(f"{number}-{n}" for n in range(length - parts_at))]
        server.ask(names, server.rng.randrange(3), rid=f"r{number}")
    reading = read(server)
    branches = list(walk(prefix_tree(reading)))
    ended = [rid for branch in branches for rid in branch.rids]
    assert sorted(ended) == sorted(prompt.rid for rank in reading.ranks for prompt in rank.prompts)
    for branch in branches:
        tokens = branch.end_tokens - branch.start_tokens
        assert tokens > 0 and all(0 <= held <= tokens for held in [*branch.pools, branch.arena])
        assert all(child.start_tokens == branch.end_tokens for child in branch.children)
        ends = len(branch.rids)
        assert branch.num_prompts == ends + sum(child.num_prompts for child in branch.children)
