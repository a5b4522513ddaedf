# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.core import SourceKind
from banyan.planner import MoveRates


def test_rates_when_short_and_long_moves_differ_then_each_class_keeps_its_own():
    rates = MoveRates()
    for _ in range(4):
        rates.observe(SourceKind.PEER, 16, 160.0)
        rates.observe(SourceKind.PEER, 4096, 4096.0)
    assert rates.expected(SourceKind.PEER, 20) == (200.0, 0.0)
    assert rates.expected(SourceKind.PEER, 5000) == (5000.0, 0.0)
    assert rates.as_dict() == {"peer": {"8": 10.0, "2048": 1.0}}


def test_rates_when_a_source_is_new_then_nothing_is_known_and_its_first_moves_prove_little():
    rates = MoveRates()
    assert rates.expected(SourceKind.STORE, 100) is None
    rates.observe(SourceKind.STORE, 100, 500.0)
    assert rates.expected(SourceKind.STORE, 100) == (500.0, 500.0)
    for _ in range(2):
        rates.observe(SourceKind.STORE, 100, 500.0)
    assert rates.expected(SourceKind.STORE, 100) == (500.0, 0.0)
    assert rates.expected(SourceKind.HOST, 100) is None


def test_rates_when_pages_are_the_ranks_own_then_they_cost_nothing():
    assert MoveRates().expected(SourceKind.OWN, 1000) == (0.0, 0.0)


def test_rates_when_a_length_was_never_moved_then_the_nearest_class_answers():
    rates = MoveRates()
    rates.observe(SourceKind.PEER, 1024, 1024.0)
    assert rates.expected(SourceKind.PEER, 16)[0] == pytest.approx(16.0)


def test_rates_when_nothing_was_moved_then_nothing_is_learnt():
    rates = MoveRates()
    rates.observe(SourceKind.PEER, 0, 10.0)
    rates.observe(SourceKind.PEER, 10, 0.0)
    assert rates.expected(SourceKind.PEER, 10) is None


def test_batch_when_kinds_came_together_then_each_is_given_its_expected_share():
    rates = MoveRates()
    for _ in range(5):
        rates.observe(SourceKind.PEER, 100, 100.0)
        rates.observe(SourceKind.HOST, 100, 300.0)
    rates.observe_batch({SourceKind.PEER: 100, SourceKind.HOST: 100, SourceKind.STORE: 0}, 800.0)
    assert rates.expected(SourceKind.PEER, 100)[0] == pytest.approx(100 + 100 / 6)
    assert rates.expected(SourceKind.HOST, 100)[0] == pytest.approx(300 + 300 / 6)
    assert rates.expected(SourceKind.STORE, 100) is None


def test_batch_when_a_kind_is_new_then_shares_are_those_of_the_tokens():
    rates = MoveRates()
    rates.observe_batch({SourceKind.PEER: 300, SourceKind.STORE: 100}, 800.0)
    assert rates.expected(SourceKind.PEER, 300)[0] == pytest.approx(600.0)
    assert rates.expected(SourceKind.STORE, 100)[0] == pytest.approx(200.0)


def test_batch_when_nothing_was_moved_then_nothing_is_learnt():
    rates = MoveRates()
    rates.observe_batch({}, 5.0)
    rates.observe_batch({SourceKind.PEER: 0}, 5.0)
    assert rates.as_dict() == {}
