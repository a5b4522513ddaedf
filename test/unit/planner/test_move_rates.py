# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_rates_when_a_process_was_suspended_in_one_move_then_it_counts_for_no_more_than_a_slow_one():
    rates = MoveRates()
    for _ in range(4):
        rates.observe(SourceKind.PEER, 1_000, 10_000.0)
    rates.observe(SourceKind.PEER, 1_000, 3_000_000.0)
    move_us, _ = rates.expected(SourceKind.PEER, 1_000)
    assert 10_000 < move_us < 30_000
    for _ in range(20):
        rates.observe(SourceKind.PEER, 1_000, 300_000.0)
    assert rates.expected(SourceKind.PEER, 1_000)[0] > 250_000, "what stays slow is learnt"


def test_rates_when_a_move_would_have_been_faster_than_expected_then_that_is_learnt_and_nothing_else():
    rates = MoveRates()
    rates.observe_at_most(SourceKind.STORE, 1_000, 10.0)
    assert rates.expected(SourceKind.STORE, 1_000) is None, "how long a move takes is not known"
    rates.observe(SourceKind.STORE, 1_000, 5_000.0)
    rates.observe_at_most(SourceKind.STORE, 1_000, 9_000.0)
    assert rates.expected(SourceKind.STORE, 1_000)[0] == 5_000.0
    rates.observe_at_most(SourceKind.STORE, 1_000, 3_000.0)
    assert rates.expected(SourceKind.STORE, 1_000)[0] == 4_000.0


def test_rates_when_nothing_was_moved_then_nothing_is_learnt():
    rates = MoveRates()
    rates.observe(SourceKind.PEER, 0, 10.0)
    rates.observe(SourceKind.PEER, 10, 0.0)
    assert rates.expected(SourceKind.PEER, 10) is None


def test_rates_when_a_length_is_measured_anew_then_what_was_before_does_not_count():
    rates = MoveRates()
    for _ in range(5):
        rates.observe(SourceKind.PEER, 100, 100_000.0)
        rates.observe(SourceKind.PEER, 1000, 5000.0)
    rates.measure_anew(SourceKind.PEER, 100)
    rates.measure_anew(SourceKind.STORE, 100)
    assert rates.expected(SourceKind.PEER, 100) == (100_000.0, 100_000.0), "proves little from now on"
    rates.observe(SourceKind.PEER, 100, 100.0)
    assert rates.expected(SourceKind.PEER, 100)[0] == pytest.approx(100.0)
    assert rates.expected(SourceKind.PEER, 1000) == (5000.0, 0.0)
    rates.measure_anew(SourceKind.PEER, 100)
    rates.observe(SourceKind.PEER, 100, 1e9)
    assert rates.expected(SourceKind.PEER, 100)[0] == pytest.approx(800.0), "a process was suspended in the trial"


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


per_token_us = st.floats(0.01, 1000.0)
several = st.integers(1, 1 << 20)


def divided_wrongly(peer_tokens, store_tokens, peer_us, store_us):
    rates = MoveRates()
    for _ in range(8):
        rates.observe(SourceKind.PEER, peer_tokens, peer_tokens * peer_us)
        rates.observe(SourceKind.STORE, store_tokens, store_tokens * store_us)
    return rates


@given(several, several, st.tuples(per_token_us, per_token_us, per_token_us, per_token_us))
def test_batch_when_kinds_only_come_together_then_what_they_take_together_is_learnt(peers, stored, us):
    rates = divided_wrongly(peers, stored, us[0], us[1])
    took_us = peers * us[2] + stored * us[3]
    for _ in range(200):
        rates.observe_batch({SourceKind.PEER: peers, SourceKind.STORE: stored}, took_us)
    expected_us = rates.expected(SourceKind.PEER, peers)[0] + rates.expected(SourceKind.STORE, stored)[0]
    assert expected_us == pytest.approx(took_us, rel=1e-3)


@pytest.mark.parametrize("off", [0.1, 10.0])
def test_batch_when_one_kind_also_comes_alone_then_a_wrong_division_heals(off):
    rates = divided_wrongly(1024, 1024, 1.0, 5.0 * off)
    for _ in range(200):
        rates.observe_batch({SourceKind.PEER: 1024}, 1024.0)
        rates.observe_batch({SourceKind.PEER: 1024, SourceKind.STORE: 1024}, 6 * 1024.0)
    assert rates.expected(SourceKind.PEER, 1024)[0] == pytest.approx(1024.0, rel=0.02)
    assert rates.expected(SourceKind.STORE, 1024)[0] == pytest.approx(5 * 1024.0, rel=0.02)
