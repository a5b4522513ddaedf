# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from banyan.arena.page_source import Wanted
from banyan.arena.remote_tier import PATIENCE_S, RemoteTier
from banyan.telemetry import Counters


class FakeNodes:
    def __init__(self):
        self.asked = []
        self.over = []
        self.is_there = True

    def ask(self, keys):
        self.asked.append(list(keys))
        return len(self.asked) if self.is_there else None

    def answers(self):
        over, self.over = self.over, []
        return over


@dataclass(frozen=True)
class FakeFound:
    num_pages: int

    def after(self, num_pages):
        return FakeFound(max(0, self.num_pages - num_pages))


class FakePrefetch:
    num_coming = 0
    num_come = 0

    def __init__(self):
        self.pulls = []

    def num_arriving(self, keys):
        return min(self.num_coming, len(keys))

    def num_in_arena(self, keys):
        return min(self.num_come, len(keys))

    def bring(self, keys, worth, found, behind):
        self.pulls.append((list(keys), found))


@pytest.fixture
def rank():
    made = SimpleNamespace(nodes=FakeNodes(), prefetch=FakePrefetch(), counters=Counters(), now_s=0.0)
    made.tier = RemoteTier(
        made.nodes,
        bring=made.prefetch.bring,
        prefetch=made.prefetch,
        counters=made.counters,
        clock=lambda: made.now_s,
    )
    return made


def test_answers_when_what_one_found_cannot_be_brought_then_the_others_are_all_the_same(rank):
    found = FakeFound(1)
    for request, key in (("r", "a"), ("s", "b")):
        rank.tier.ask(Wanted(request, [key], 0, None))

    def fails(*args):
        rank.tier._bring = rank.prefetch.bring
        raise OSError("no descriptor is left")

    rank.nodes.over, rank.tier._bring = [(1, found), (2, found)], fails
    with pytest.raises(OSError, match="descriptor"):
        rank.tier.poll()
    rank.tier.poll()
    assert rank.prefetch.pulls == [(["b"], found)] and not rank.tier._questions


def test_request_when_a_node_has_pages_then_they_are_pulled_and_it_is_awaited_till_then(rank):
    found = FakeFound(1)
    rank.tier.ask(Wanted("r", ["a", "b"], 0, None))
    assert rank.tier.is_awaited("r") and not rank.tier.is_awaited("other")
    rank.nodes.over = [(1, found)]
    rank.tier.poll()
    assert not rank.tier.is_awaited("r") and rank.prefetch.pulls == [(["a", "b"], found)]
    assert (rank.counters.questions, rank.counters.question_hits) == (1, 1)


def test_answer_when_pages_have_come_since_the_question_then_what_was_found_behind_them_is_brought(rank):
    rank.tier.ask(Wanted("r", ["held", "a", "b", "c"], 1, None))
    rank.prefetch.num_come, rank.nodes.over = 1, [(1, FakeFound(2))]
    rank.tier.poll()
    assert rank.prefetch.pulls == [(["b", "c"], FakeFound(1))]


def test_request_when_pages_are_on_their_way_then_only_the_rest_is_asked_for(rank):
    rank.prefetch.num_coming = 1
    rank.tier.ask(Wanted("r", ["a", "b"], 0, None))
    rank.tier.ask(Wanted("s", ["a"], 0, None))
    assert rank.nodes.asked == [["b"]] and not rank.tier.is_awaited("s")


def test_request_when_nobody_listens_or_answers_then_it_is_not_held_back_for_long(rank):
    rank.nodes.is_there = False
    rank.tier.ask(Wanted("r", ["a"], 0, None))
    assert not rank.tier.is_awaited("r")
    rank.nodes.is_there = True
    rank.tier.ask(Wanted("s", ["a"], 0, None))
    rank.now_s = PATIENCE_S
    assert not rank.tier.is_awaited("s")


def test_answer_when_it_comes_after_everything_was_forgotten_then_nothing_is_pulled(rank):
    rank.tier.ask(Wanted("r", ["a"], 0, None))
    rank.tier.forget()
    rank.nodes.over = [(1, FakeFound(1))]
    rank.tier.poll()
    assert rank.prefetch.pulls == [] and not rank.tier.is_awaited("r")
