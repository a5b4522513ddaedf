# SPDX-License-Identifier: Apache-2.0
"""Who goes first, and a tree under random use: locked nodes and parents stay, whatever is a duplicate when."""

from __future__ import annotations

import random

import pytest

from banyan.core import SourceKind
from banyan.planner.victims import (
    LOOKS_PER_PAGE,
    MOST_LOOKS,
    REFRESH_S,
    UNMEASURED_SHARE,
    CostShares,
    Leaf,
    Looks,
    Walk,
)


class Tree:
    """Nodes by age, each behind its parent; offers its leaves as SGLang's tree does, a parent not before a new walk."""

    def __init__(self):
        self.parent = {}
        self.locked = set()
        self.used_at = {}
        self.now = 0
        self._offered = []

    def add(self, node, parent=None):
        self.parent[node] = parent
        self.touch(node)

    def touch(self, node):
        self.now += 1
        while node is not None:
            self.used_at[node] = self.now
            node = self.parent[node]

    def leaves(self):
        inner = set(self.parent.values())
        return sorted((node for node in self.parent if node not in inner and node not in self.locked), key=self.age)

    def age(self, node):
        return self.used_at[node], node

    def start(self):
        self._offered = self.leaves()

    def next(self):
        return self._offered.pop(0) if self._offered else None

    def evict(self, node):
        assert node in self.leaves(), "only a leaf that nobody uses"
        del self.parent[node], self.used_at[node]


def looking(duplicates, reload_costs=None):
    """A leaf of the tree as a walk sees it: who else has it, and what its reload cost would cost."""

    def leaf(node):
        copy = SourceKind.PEER if node in duplicates else None
        reload_cost = 1.0 if reload_costs is None else reload_costs[node]
        return Leaf(node, str(node), copy, reload_cost * (0.01 if copy else 1.0))

    return lambda nodes: list(map(leaf, nodes))


def walk_of(tree, duplicates, *, reload_costs=None, looks=None, **how):
    tree.start()
    how = {"uncovers": lambda node: False, **how}
    return Walk(tree.next, tree.start, looking(duplicates, reload_costs), looks or Looks(), **how)


def evicted(tree, duplicates, num_nodes, **how):
    walk, gone = walk_of(tree, duplicates, **how), []
    while len(gone) < num_nodes and (leaf := walk.choose()) is not None:
        tree.evict(leaf.node)
        gone.append(leaf.node)
    return gone


@pytest.fixture
def flat():
    tree = Tree()
    for node in range(6):
        tree.add(node)
    return tree


def test_choose_when_none_is_a_duplicate_then_by_age(flat):
    assert evicted(flat, set(), 3) == [0, 1, 2]


def test_choose_when_some_are_duplicates_then_these_first_and_then_by_age(flat):
    assert evicted(flat, {2, 4}, 4) == [2, 4, 0, 1]


def test_choose_when_one_is_less_likely_to_be_wanted_then_it_goes_first(flat):
    assert evicted(flat, set(), 2, reload_costs=[5.0, 4.0, 3.0, 1.0, 3.0, 2.0]) == [3, 5]


def test_choose_when_copying_is_as_dear_as_computing_then_a_duplicate_is_no_better(flat):
    assert evicted(flat, {2}, 3, reload_costs=[1.0, 1.0, 100.0, 1.0, 1.0, 1.0]) == [0, 1, 2]


def test_choose_when_a_duplicate_is_beyond_the_nearest_then_age_decides(flat):
    assert evicted(flat, {5}, 3, near=3) == [0, 1, 2]
    assert evicted(flat, {5}, 1, near=3) == [5]


def test_choose_when_looks_were_earned_then_a_duplicate_is_found_further_on(flat):
    looks = Looks()
    looks.earn(round(4 / LOOKS_PER_PAGE))
    assert evicted(flat, {5}, 2, near=2, looks=looks) == [5, 0]
    assert not looks.spend(1)


def test_choose_when_a_duplicate_is_near_then_no_look_is_spent(flat):
    looks = Looks(num_saved=3)
    assert evicted(flat, {0, 1, 2}, 2, near=2, looks=looks) == [0, 1]
    assert looks.num_saved == 3


def test_looks_when_much_has_gone_then_they_are_bounded():
    looks = Looks()
    looks.earn(1_000_000)
    assert sum(looks.spend(1) for _ in range(2 * MOST_LOOKS)) == MOST_LOOKS


def test_choose_when_children_have_gone_then_their_parent_follows():
    tree = Tree()
    tree.add(0)
    tree.add(1, 0)
    tree.add(2, 0)
    assert evicted(tree, {2}, 9) == [2, 1, 0]


def test_choose_when_everything_is_in_use_then_nothing(flat):
    flat.locked = set(range(6))
    assert evicted(flat, {1}, 1) == []


def test_choose_when_looked_at_then_each_leaf_once(flat):
    asked = []
    flat.start()
    look = looking(set())
    walk = Walk(
        flat.next,
        flat.start,
        lambda nodes: asked.extend(nodes) or look(nodes),
        Looks(),
        uncovers=lambda node: True,
        near=4,
    )
    for _ in range(2):
        flat.evict(walk.choose().node)
    assert asked == [0, 1, 2, 3, 4]
    assert walk.choose().node == 2


@pytest.fixture
def stretches():
    """Three runs of four stretches, the oldest first: 0 to 3, 10 to 13, 20 to 23."""
    tree = Tree()
    for run in (0, 10, 20):
        for stretch in range(run, run + 4):
            tree.add(stretch, stretch - 1 if stretch > run else None)
    return tree


def test_choose_when_a_stretch_uncovers_the_one_before_it_then_the_oldest_run_goes_on(stretches):
    ages = {node: 1.0 / (100 - node // 10) for node in stretches.parent}
    assert evicted(stretches, set(), 5, reload_costs=ages, uncovers=lambda node: node % 10 > 0) == [3, 2, 1, 0, 13]


def test_choose_when_nothing_is_known_of_the_parents_then_a_stretch_of_each_run_goes(stretches):
    assert evicted(stretches, set(), 3) == [3, 13, 23]


def test_choose_when_a_walk_starts_over_then_what_was_paid_for_stays_in_view():
    tree, looks = Tree(), Looks(num_saved=4)
    for node in range(8):
        tree.add(node)
    assert evicted(tree, {6}, 2, near=2, looks=looks, uncovers=lambda node: True) == [0, 6]
    assert looks.num_saved == 0


def test_shares_when_copying_is_quick_then_small_and_never_more_than_computing():
    shares = CostShares({SourceKind.PEER: 0.01, SourceKind.HOST: 3.0}.get, lambda: 0.0)
    shares.refresh()
    copies = [None, SourceKind.PEER, SourceKind.HOST]
    assert shares.reload_costs(copies, [1.0, 1.0, 0.5]) == [1.0, 0.01, 0.5]


def test_shares_when_nothing_was_measured_then_copies_are_taken_to_be_quick_until_it_was():
    measured, now_s = {}, [0.0]
    shares = CostShares(measured.get, lambda: now_s[0])
    assert shares.reload_costs([SourceKind.PEER], [1.0]) == [UNMEASURED_SHARE]
    shares.refresh()
    measured[SourceKind.PEER] = 0.5
    shares.refresh()
    assert shares.reload_costs([SourceKind.PEER], [1.0]) == [UNMEASURED_SHARE]
    now_s[0] = REFRESH_S
    shares.refresh()
    assert shares.reload_costs([SourceKind.PEER], [1.0]) == [0.5]


@pytest.mark.parametrize("seed", range(10))
def test_tree_when_used_at_random_ten_thousand_times_then_leaves_go_and_nothing_that_is_used(seed):
    rng = random.Random(seed)
    tree, number = Tree(), 0
    for _ in range(10_000):
        nodes = list(tree.parent)
        match rng.randrange(5):
            case 0 | 1:
                tree.add(number, rng.choice([None, *nodes[-8:]]))
                number += 1
            case 2 if nodes:
                tree.touch(rng.choice(nodes))
            case 3 if nodes:
                node = rng.choice(nodes)
                tree.locked ^= {node}
            case _ if len(nodes) > 20:
                free, duplicates = set(nodes) - tree.locked, {node for node in nodes if rng.random() < 0.4}
                uncovers = rng.choice([True, False])
                how = {"near": rng.choice([1, 4, 16]), "looks": Looks(rng.randrange(20))}
                how["uncovers"] = lambda node, answer=uncovers: answer
                gone = evicted(tree, duplicates, rng.randrange(1, 12), **how)
                assert set(gone) <= free and len(set(gone)) == len(gone)
        tree.locked &= set(tree.parent)
        assert all(parent is None or parent in tree.parent for parent in tree.parent.values())
