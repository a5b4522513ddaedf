# SPDX-License-Identifier: Apache-2.0
"""Who goes first, and a tree under random use: locked nodes and parents stay, whatever is a duplicate when."""

from __future__ import annotations

import random

import pytest

from banyan.planner.victims import Walk


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


def walk_of(tree, duplicates, **how):
    tree.start()
    return Walk(tree.next, tree.start, duplicates.__contains__, **how)


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


def test_choose_when_a_duplicate_is_beyond_the_window_then_age_decides(flat):
    assert evicted(flat, {5}, 3, window=3) == [0, 1, 2]
    assert evicted(flat, {5}, 1, window=3) == [5]


def test_choose_when_children_have_gone_then_their_parent_follows():
    tree = Tree()
    tree.add(0)
    tree.add(1, 0)
    tree.add(2, 0)
    assert evicted(tree, {2}, 9) == [2, 1, 0]


def test_choose_when_everything_is_in_use_then_nothing(flat):
    flat.locked = set(range(6))
    assert evicted(flat, {1}, 1) == []


def test_choose_when_looked_up_then_each_leaf_once(flat):
    asked = []
    flat.start()
    walk = Walk(flat.next, flat.start, lambda node: bool(asked.append(node)), window=4)
    for _ in range(2):
        flat.evict(walk.choose().node)
    assert asked == [0, 1, 2, 3, 4]


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
                gone = evicted(tree, duplicates, rng.randrange(1, 12), window=rng.choice([1, 4, 16]))
                assert set(gone) <= free and len(set(gone)) == len(gone)
        tree.locked &= set(tree.parent)
        assert all(parent is None or parent in tree.parent for parent in tree.parent.values())
