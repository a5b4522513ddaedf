# SPDX-License-Identifier: Apache-2.0
"""Whom a rank asks when a router has said whose arenas have more of a prompt."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
from test.unit.arena.test_remote_tier import FakeNodes, FakePrefetch

from banyan.arena.page_source import Wanted
from banyan.core import Run, SourceKind
from banyan.features.nodes.node_tier import NodeTier
from banyan.features.nodes.pull import NodeFound
from banyan.telemetry import Counters

NODES = ("a:1", "b:1")


class PageServers(FakeNodes):
    """All of ``NODES`` listen."""

    def __init__(self):
        super().__init__()
        self.at = []

    num_given_up = 0

    def give_up(self):
        self.num_given_up += 1

    def knows(self, node):
        return node in NODES

    def ask(self, keys):
        self.at.append(NODES)
        return super().ask(keys)

    def ask_at(self, nodes, keys):
        self.at.append(tuple(nodes))
        return super().ask(keys)

    def read(self, *wanted):
        raise AssertionError("nobody reads here")


class Pulls(FakePrefetch):
    def start_pull(self, keys, worth, found, pull, origin, behind):
        self.pulls.append((origin, found.keys))


@pytest.fixture
def rank():
    made = SimpleNamespace(page_servers=PageServers(), counters=Counters(), prefetch=Pulls(), choices=[])

    def choose(*choice):
        made.choices.append(choice)
        return made.chosen

    made.tier = NodeTier(
        made.page_servers,
        prefetch=made.prefetch,
        counters=made.counters,
        clock=lambda: 0.0,
        told=lambda request: made.said,
        choose=choose,
    )
    return made


def counted(rank):
    counters = rank.counters
    return counters.questions, counters.questions_directed, counters.questions_spared


@pytest.mark.parametrize(
    ("sources", "asked", "counts"),
    [
        (["b:1"], [("b:1",)], (1, 1, 0)),
        (["b:1", "stranger:1"], [("b:1",)], (1, 1, 0)),
        (["stranger:1"], [NODES], (1, 0, 0)),
        ([], [], (0, 0, 1)),
    ],
)
def test_request_when_sources_are_named_then_only_those_of_them_are_asked_that_are_nodes(rank, sources, asked, counts):
    rank.said = sources
    rank.tier.ask(Wanted("r", ["k"], 0, None))
    assert rank.page_servers.at == asked and counted(rank) == counts
    assert rank.tier.is_awaited("r") == bool(asked)


def test_request_when_nothing_is_missing_then_no_question_was_spared(rank):
    for sources in ([], ["a:1"]):
        rank.said = sources
        rank.tier.ask(Wanted("r", ["k"], 1, None))
    assert rank.page_servers.at == [] and counted(rank) == (0, 0, 0)


def test_request_when_the_named_node_does_not_listen_then_it_is_not_held_back(rank):
    rank.page_servers.is_there = False
    rank.said = ["a:1"]
    rank.tier.ask(Wanted("r", ["k"], 0, None))
    assert not rank.tier.is_awaited("r") and counted(rank) == (0, 0, 0)


def test_pages_when_several_nodes_have_some_then_they_come_from_the_chosen_one(rank):
    rank.said, rank.chosen, wanted = None, 1, list("kqrst")
    rank.prefetch.num_come = 1
    for found in (NodeFound("a:1", 0, list("qrst"), (NodeFound("b:1", 1, list("qrs")),)), NodeFound("a:1", 0, ["q"])):
        rank.tier.ask(Wanted("r", wanted, 1, None))
        rank.page_servers.over = [(len(rank.page_servers.asked), found)]
        rank.tier.poll()
    assert rank.prefetch.pulls == [("b:1", ["r", "s"]), ("a:1", [])]
    runs = [Run(SourceKind.REMOTE, 3, "a:1"), Run(SourceKind.REMOTE, 2, "b:1")]
    assert rank.choices == [("r", 3, runs)], "of what has not come; where one node alone has some there is no choice"


def test_tier_when_it_is_let_go_then_it_is_gone_without_a_collection(rank):
    """What it refers to holds a reader's place, which is taken again at once after a weight update."""
    gc.disable()
    try:
        gone = weakref.ref(rank.tier)
        del rank.tier
        assert gone() is None
    finally:
        gc.enable()


def test_tier_when_it_forgets_then_what_is_being_pulled_is_given_up(rank):
    rank.tier.forget()
    assert rank.page_servers.num_given_up == 1
