# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan_lab.sim import pair
from banyan_lab.sim.pair import Asked, PairRates

RATES = PairRates(prefill_tokens_per_s=1000, decode_tokens_per_s=1000, without_reads_s=0.1, detour_s=0.05)


def alone(stored_tokens, *, has_dual_path, rates=RATES):
    asked = [Asked(at_s=3.0, stored_tokens=stored_tokens, has_dual_path=has_dual_path)]
    return pair.times_s(asked, rates)[0]


def test_request_when_prefill_reads_alone_then_its_read_and_what_comes_behind_it():
    assert alone(2000, has_dual_path=False) == pytest.approx(2.1)
    assert alone(0, has_dual_path=False) == pytest.approx(0.1)


def test_request_when_both_read_then_both_end_together():
    # 1025 and 975 tokens: the decode side's are on the way for 50 ms more.
    assert alone(2000, has_dual_path=True) == pytest.approx(1.125, abs=0.002)


def test_request_when_decode_is_much_faster_then_it_reads_all():
    fast = PairRates(prefill_tokens_per_s=1000, decode_tokens_per_s=100_000, without_reads_s=0.1, detour_s=0.05)
    assert alone(2000, has_dual_path=True, rates=fast) == pytest.approx(0.02 + 0.05 + 0.1)


def test_requests_when_they_come_at_once_then_they_share_the_stores():
    asked = [Asked(at_s=0.0, stored_tokens=2000, has_dual_path=False)] * 2
    assert pair.times_s(asked, RATES) == pytest.approx([4.1, 4.1])
    dual = [Asked(at_s=0.0, stored_tokens=2000, has_dual_path=True)] * 2
    assert max(pair.times_s(dual, RATES)) == pytest.approx(2.1, rel=0.05)
