# SPDX-License-Identifier: Apache-2.0
import hashlib

import pytest

from banyan._native import page_numbers
from banyan.sglang_plugin.rank.evicting.node_demand import NodeDemand
from banyan.telemetry import Counters, NodeReuse

PAGE = 16


class Wire:
    """Two ranks that hear each other."""

    def __init__(self):
        self.sent = [[], []]

    def end(self, rank):
        def take():
            heard = list(self.sent[1 - rank])
            self.sent[1 - rank].clear()
            return heard

        def log(message):
            """As a frame table does: the first word is marked."""
            self.sent[rank].append(bytes([message[0] | 1]) + message[1:])

        return type("End", (), {"log_access": staticmethod(log), "peer_accesses": staticmethod(take)})


class Node:
    def __init__(self):
        self.now_s = 0.0
        self.wire = wire = Wire()
        self.counters = [Counters(), Counters()]
        self.reuse = [NodeReuse(PAGE, 100, rank, lambda: self.now_s) for rank in range(2)]
        self.demand = [NodeDemand(wire.end(rank), 100, self.counters[rank], self.reuse[rank]) for rank in range(2)]

    def serve(self, rank, keys, num_cached, num_tokens):
        self.demand[rank].answered(num_tokens, self.demand[rank].tell(keys), num_cached)

    def ceilings(self):
        self.now_s += 10.0
        for one in self.demand:
            one.hear()
        return [one.figures(lambda times: 100.0)["hit_ceiling_1h"] for one in self.reuse]


@pytest.fixture
def node():
    return Node()


def keys(*names):
    return [hashlib.sha256(str(name).encode()).hexdigest() for name in names]


def test_ceiling_when_both_ranks_computed_the_same_then_each_knows_that_once_was_enough(node):
    for rank in range(2):
        node.serve(rank, keys(1, 2, 3), 0, 50)
    assert node.ceilings() == pytest.approx([48 / 100] * 2, abs=0.001)


def test_ceiling_when_the_other_rank_has_found_it_all_then_nothing_is_lost(node):
    node.serve(0, keys(1, 2), 0, 33)
    node.serve(1, keys(1, 2), 2, 33)
    assert node.ceilings() == pytest.approx([32 / 66] * 2, abs=0.001)


def test_hear_when_a_peer_tells_of_an_answer_then_no_prompt_is_counted_for_it(node):
    node.serve(0, keys(1, 2), 0, 33)
    node.ceilings()
    assert [one.peer_prompts for one in node.counters] == [0, 1]
    assert not node.demand[1].is_asked_again(keys(1)[0])


def test_hear_when_the_beginning_of_a_message_was_missed_then_the_rest_is_no_prompt(node):
    node.serve(0, keys(1, 2), 0, 33)
    node.wire.sent[0].append(page_numbers(keys(3, 4)))
    node.ceilings()
    assert node.counters[1].peer_prompts == 1


def test_answered_when_the_prompt_is_shorter_than_a_page_then_its_tokens_count(node):
    node.serve(0, keys(1), 0, 16)
    node.demand[0].answered(16, b"", 0)
    node.serve(0, keys(1), 1, 16)
    assert node.ceilings() == pytest.approx([16 / 48] * 2, abs=0.001)
