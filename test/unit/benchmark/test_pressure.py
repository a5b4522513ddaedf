# SPDX-License-Identifier: Apache-2.0
"""The model of a node under pressure: its trees stay trees, and its answers are those that one can work out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from banyan.planner.victims import Leaf, Looks
from banyan_lab.sim.caches import Arena
from banyan_lab.sim.tree import Tree, Victims
from benchmark.pressure.approximate import ApproximateTrees
from benchmark.pressure.copies import distinct_share, most_distinct_share, spare_share
from benchmark.pressure.node import Node
from benchmark.pressure.setting import BELADY, DUPLICATES_FIRST, LOSS, LOSS_BY_AGE, RANDOM, Setting
from benchmark.pressure.study import main, table
from benchmark.pressure.workloads import HOT_SHARE, documents, hot, scan, turns

PAGES = 10
FOUND = 1 - 1 / PAGES
"""Of a prompt that is held: its last page is computed."""


def prompts(*numbers):
    return [list(range(number * 100, number * 100 + PAGES)) for number in numbers]


def play(setting, asked, num_measured):
    return Node(setting).play(asked, num_measured)


ROOM = 2 * PAGES + 1
ONE = Setting(num_ranks=1, pool_pages=ROOM, concurrency=1)
TWO = Setting(num_ranks=2, pool_pages=ROOM, concurrency=1)


def test_one_rank_when_the_oldest_is_asked_next_then_lru_has_just_dropped_it():
    assert play(ONE, prompts(0, 1, 2, 0, 1, 2), 3).hits == 0.0


def test_one_rank_when_it_knows_the_future_then_it_keeps_what_is_wanted_first():
    assert play(replace(ONE, evicts=BELADY), prompts(0, 1, 2, 0, 1, 2), 3).hits > 0.4


def test_one_rank_when_all_fits_then_everything_is_found():
    assert play(ONE, prompts(0, 1, 0, 1), 2).hits == pytest.approx(FOUND)


def test_ranks_when_they_fetch_then_a_peers_prefix_is_found_and_counted():
    outcome = play(replace(TWO, policy="round_robin"), prompts(0, 0), 1)
    assert outcome.hits == FOUND and outcome.num_fetched == outcome.num_cached


def test_ranks_when_they_share_nothing_then_a_peers_prefix_is_computed():
    assert play(replace(TWO, policy="round_robin", fetches=False), prompts(0, 0), 1).hits == 0.0


def test_ranks_when_one_holds_a_duplicate_then_that_goes_before_a_last_copy():
    """The fourth request copies 0 to rank 1, which holds 1. Then rank 1 needs room, and then 1 is asked for."""
    by_turns = replace(TWO, policy="round_robin")
    asked = prompts(0, 1, 2, 0, 2, 4, 1)
    assert play(by_turns, asked, 1).hits == 0.0
    assert play(replace(by_turns, evicts=DUPLICATES_FIRST), asked, 1).hits == FOUND
    assert play(replace(by_turns, evicts=LOSS), asked, 1).hits == FOUND


def test_arena_when_pages_leave_the_pools_then_they_are_found_there():
    outcome = play(replace(TWO, arena_pages=10 * PAGES), prompts(*range(8), *range(8)), 8)
    assert outcome.hits == pytest.approx(FOUND) and outcome.num_evicted_last == 0


def test_arena_when_a_page_is_in_a_pool_then_it_takes_no_frame_until_it_leaves(monkeypatch):
    """Write-back, as servers: of three prompts two fit into the pool."""
    in_arena = []
    monkeypatch.setattr(Arena, "insert", lambda arena, pages: in_arena.extend(pages))
    play(replace(ONE, arena_pages=10 * PAGES), prompts(0, 1, 2), 3)
    assert sorted(map(int, in_arena)) == prompts(0)[0]


def test_batch_when_prompts_are_computed_side_by_side_then_they_find_nothing_of_each_other():
    both = replace(ONE, concurrency=3, pool_pages=100)
    assert play(both, [*prompts(5), *prompts(0, 0)], 2).hits == 0.0, "the first has a batch of its own"
    assert play(replace(both, concurrency=2), [*prompts(5), *prompts(0, 0)], 2).hits > 0.4


def test_pool_when_requests_under_way_lock_it_then_the_next_one_waits():
    alone = replace(ONE, pool_pages=2 * PAGES)
    one, two = (play(replace(alone, concurrency=num), prompts(0, 1, 2, 3), 4) for num in (1, 2))
    assert max(two.ttft_s) > 1.9 * max(one.ttft_s)


def test_pool_when_a_long_node_is_split_then_a_prompt_that_lost_its_tail_is_still_found():
    """Room for one and a half prompts. The third pushes out as much of the second as it needs."""
    one = replace(ONE, pool_pages=30, evicts=LOSS)
    asked = [list(range(number * 100, number * 100 + 20)) for number in (0, 1, 2, 1)]
    assert play(one, asked, 1).hits == 0.0
    assert play(replace(one, splits=True), asked, 1).hits == 0.4


def test_ranks_when_one_computes_the_prefix_and_pools_are_full_then_the_next_waits_and_fetches():
    """Two prompts of one beginning come together, to ranks that are full of something else."""
    stem = list(range(900, 920))
    asked = [list(range(number * 100, number * 100 + 30)) for number in (0, 1)]
    asked += [[*stem, *range(2_000, 2_010)], [*stem, *range(3_000, 3_010)]]
    full = replace(TWO, policy="round_robin", pool_pages=35, concurrency=2, counts_displaced=True)
    apart, waiting = play(full, asked, 2), play(replace(full, waits=True), asked, 2)
    assert (apart.num_held_back, waiting.num_held_back) == (0, 1)
    assert (apart.num_cached, waiting.num_cached) == (0, 20 * 16)


def test_router_when_a_prompt_is_known_then_its_server_and_else_the_one_that_was_sent_least():
    trees = ApproximateTrees(2)
    assert [trees.place(pages) for pages in prompts(0, 1, 0, 1, 2)] == [0, 1, 0, 1, 0]
    assert trees.place([*prompts(1)[0][:4], *range(900, 906)]) == 1
    assert trees.place([*prompts(0)[0][:3], *range(700, 707)]) == 1, "too little of it is known"


def test_play_when_repeated_then_the_same():
    drawn = documents(12, seed=3)
    setting = Setting(num_ranks=2, pool_pages=600, evicts=RANDOM, seed=4)
    first, second = (play(setting, drawn.prompts, drawn.num_measured) for _ in range(2))
    assert (first.num_cached, first.ttft_s) == (second.num_cached, second.ttft_s)


def test_scan_when_drawn_then_one_in_four_comes_back():
    drawn = scan(8, seed=1)
    seen = [prompt[0] for prompt in drawn.prompts]
    assert sum(seen.count(first) > 1 for first in seen) == len(seen) // 4


def test_hot_when_drawn_then_it_is_the_scan_without_what_never_comes_back():
    drawn, alone = scan(8, seed=1), hot(8, seed=1)
    assert drawn.prompts[::HOT_SHARE] == alone.prompts
    assert drawn.num_measured == HOT_SHARE * alone.num_measured


def test_turns_when_drawn_then_conversations_grow_from_one_beginning_and_end():
    drawn = turns(20, seed=1)
    asked = [prompt[-1] // 1_000 for prompt in drawn.prompts]
    lengths = [len(prompt) for prompt, one in zip(drawn.prompts, asked, strict=True) if one == asked[0]]
    assert lengths == sorted(set(lengths)) and len(lengths) > 1
    assert all(prompt[:30] == drawn.prompts[0][:30] for prompt in drawn.prompts)
    assert len(set(asked)) > 8


def test_one_rank_when_a_scan_runs_beside_a_hot_set_then_loss_keeps_it_and_age_does_not():
    drawn = scan(40, seed=1)
    pool = Setting(num_ranks=1, pool_pages=2 * drawn.num_distinct)
    by_age, by_loss = (Node(replace(pool, evicts=how)).play(drawn.prompts, drawn.num_measured) for how in ("lru", LOSS))
    assert by_age.hits < 0.15
    assert by_loss.hits > 0.23


@pytest.mark.parametrize(("draw", "least"), [(documents, 1.5), (turns, 0.98)])
def test_ranks_when_the_chance_is_learnt_then_more_is_found_of_what_comes_round_and_nothing_lost_of_what_grows(
    draw, least
):
    found = {LOSS: 0.0, LOSS_BY_AGE: 0.0}
    for evicts in found:
        for seed in range(4):
            drawn = draw(60, seed)
            pools = {"num_ranks": 2, "pool_pages": round(drawn.num_distinct / 3.5), "splits": True, "waits": True}
            setting = Setting(**pools, evicts=evicts, counts_displaced=True, seed=seed)
            found[evicts] += Node(setting).play(drawn.prompts, drawn.num_measured).hits
    assert found[LOSS] > least * found[LOSS_BY_AGE]


@pytest.mark.parametrize("seed", range(10))
def test_tree_when_used_at_random_ten_thousand_times_then_whole_within_bounds_and_locked_pages_stay(seed):
    rng = random.Random(seed)
    held: set[int] = set()
    near, splits = rng.choice([1, 4, 1 << 30]), seed % 2 == 0
    victims = Victims(lambda pages: [Leaf(page, "", None, rng.random()) for page in pages], near, Looks(), splits)
    tree = Tree(60, victims=victims, gone=lambda page: held.discard(page))
    locked: list[list[int]] = []
    for _ in range(10_000):
        if locked and (len(locked) > 3 or rng.random() < 0.4):
            tree.unlock(locked.pop(rng.randrange(len(locked))))
            continue
        stem, branch = rng.randrange(4), rng.randrange(40)
        pages = [stem * 1_000 + page for page in range(4)] + [
            100_000 + (stem * 40 + branch) * 100 + page for page in range(rng.randrange(6))
        ]
        num_matched = tree.match(pages)
        tree.lock(pages[:num_matched])
        if num_matched:
            tree.touch(pages[:num_matched])
        pages = pages[: tree.insert(pages, num_matched)]
        held.update(pages)
        locked.append(pages)
        assert len(tree) == len(held) <= 60
        assert all(page in tree for chain in locked for page in chain)
        assert tree.match(pages) == len(pages)


def test_most_distinct_share_when_all_prompts_begin_alike_then_each_rank_holds_that_beginning():
    prompts = [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6]]
    assert most_distinct_share(prompts, 4, 40) == 1 - 3 * 2 / 40
    assert most_distinct_share(prompts, 1, 40) == 1.0
    assert most_distinct_share([*prompts, [7, 8]], 4, 40) == 1.0


def pools(*prompts):
    """A pool for each rank that holds these prompts, and who holds what."""
    trees, holders = [], {}
    for rank, held in enumerate(prompts):
        tree = Tree(
            60, victims=Victims(lambda pages: [Leaf(page, "", None, 0.0) for page in pages], 1), gone=lambda page: None
        )
        for pages in held:
            num_matched = tree.match(pages)
            tree.lock(pages[:num_matched])
            if num_matched:
                tree.touch(pages[:num_matched])
            tree.unlock(pages[: tree.insert(pages, num_matched)])
            for page in pages:
                holders[page] = holders.get(page, 0) | 1 << rank
        trees.append(tree)
    return trees, holders


def test_copies_when_two_ranks_hold_a_prompt_then_half_of_its_pages_are_distinct_and_half_could_go():
    trees, holders = pools([[1, 2, 3, 4]], [[1, 2, 3, 4]])
    assert distinct_share(trees, holders) == 0.5
    assert spare_share(trees, holders) == 0.5


def test_copies_when_each_rank_goes_on_from_a_common_beginning_then_none_of_it_could_go():
    trees, holders = pools([[1, 2, 3, 40]], [[1, 2, 3, 50]])
    assert distinct_share(trees, holders) == 5 / 8
    assert spare_share(trees, holders) == 0


def test_copies_when_one_rank_goes_on_from_a_common_beginning_then_the_other_ones_copy_could_go():
    trees, holders = pools([[1, 2, 3, 40]], [[1, 2, 3]])
    assert spare_share(trees, holders) == 3 / 7


def test_copies_when_a_request_uses_one_then_only_the_others_could_go():
    trees, holders = pools([[1, 2]], [[1, 2]], [[1, 2]])
    trees[0].lock([1, 2])
    assert spare_share(trees, holders) == 4 / 6
    trees[1].lock([1, 2])
    trees[2].lock([1])
    assert spare_share(trees, holders) == 1 / 6


def test_copies_when_a_node_plays_then_what_could_go_is_no_more_than_what_is_not_distinct():
    drawn = turns(30, seed=2)
    outcome = Node(Setting(num_ranks=2, pool_pages=drawn.num_distinct // 3)).play(drawn.prompts, drawn.num_measured)
    assert outcome.spare and max(outcome.spare) <= 1 - min(outcome.distinct)
    assert any(outcome.spare)


def test_table_when_draws_differ_then_means_and_each_draw():
    row = {"workload": "w", "ratio": 1.0, "num_ranks": 2, "system": "s", "distinct_share": 1.0}
    row |= {"spare_share": 0.0, "fetched_share": 0.0, "evicted_last_share": 0.0, "ttft_mean_s": 1.0, "ttft_p90_s": 2.0}
    (made,) = table([{**row, "hits": 0.25}, {**row, "hits": 0.75}])
    assert (made["hits"], made["draws"], made["hits_by_draw"]) == (0.5, 2, [0.25, 0.75])


def test_main_when_a_workload_is_not_there_then_it_says_so(capsys):
    assert main(["--workload", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
