# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from banyan.planner import ForwardSample, PrefillCost, PrefillTimes

COST = PrefillCost(fixed_us=1000.0, token_us=100.0, pair_us=0.01, context_us=0.0)


def forward(extend, prefix=0, *, factor=1.0):
    return ForwardSample(((extend, prefix),), COST.time_us([(extend, prefix)]) * factor)


def test_times_when_nothing_is_known_then_they_say_so():
    assert PrefillTimes().expected((100, 0)) is None


def test_times_when_forwards_take_longer_than_known_then_what_is_expected_follows():
    times = PrefillTimes(COST)
    for _ in range(20):
        times.observe(forward(200, factor=2.0))
    time_us, error_us, _ = times.expected((200, 0))
    assert time_us == pytest.approx(2 * COST.time_us([(200, 0)]))
    assert error_us == 0.0


def test_times_when_forwards_scatter_then_the_error_tells():
    times = PrefillTimes(COST)
    for number in range(200):
        times.observe(forward(200, factor=0.8 if number % 2 else 1.2))
    time_us, error_us, _ = times.expected((200, 0))
    assert error_us == pytest.approx(0.2 * time_us, rel=0.3)


def test_times_when_no_cost_is_known_then_the_first_forwards_make_a_fit_and_later_ones_renew_it():
    times, rng = PrefillTimes(), random.Random(0)
    for number in range(64):
        times.observe(forward(rng.randrange(16, 1000), rng.randrange(0, 4000)))
        assert (times.expected((300, 1000)) is None) == (number < 7)
    assert times.expected((300, 1000))[0] == pytest.approx(COST.time_us([(300, 1000)]), rel=0.01)
    for _ in range(400):
        times.observe(forward(rng.randrange(16, 1000), rng.randrange(0, 4000), factor=3.0))
    assert times.expected((300, 1000))[0] == pytest.approx(3 * COST.time_us([(300, 1000)]), rel=0.01)
    assert len(times.samples) <= 4 * 16 and times.samples[-1][0] == 463


def long_forwards_then_short_ones():
    times, rng = PrefillTimes(), random.Random(0)
    for _ in range(64):
        times.observe(forward(rng.randrange(2000, 10_000)))
    for _ in range(128):
        times.observe(forward(1))
    return times


def test_times_when_many_short_forwards_follow_long_ones_then_what_long_ones_take_is_still_known():
    times = long_forwards_then_short_ones()
    for num_tokens in (1, 8192):
        assert times.expected((num_tokens, 0))[0] == pytest.approx(COST.time_us([(num_tokens, 0)]), rel=0.05)


def test_times_when_forwards_go_on_alike_then_fits_grow_rare_and_come_again_with_lengths_that_are_new(monkeypatch):
    fits, fit = [], PrefillCost.fit
    times = PrefillTimes()
    monkeypatch.setattr(PrefillCost, "fit", lambda samples: fits.append(times.num_observed) or fit(samples))
    for _ in range(4096):
        times.observe(forward(64))
    assert fits == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    for _ in range(8):
        times.observe(forward(4096))
    assert fits[-1] == 4104, "the first few of their length"
    assert times.expected((4096, 0))[0] == pytest.approx(COST.time_us([(4096, 0)]), rel=0.05)


def test_times_when_only_short_forwards_were_seen_then_nothing_is_said_of_much_longer_ones():
    times = PrefillTimes()
    for _ in range(128):
        times.observe(forward(1))
    assert times.expected((16, 100_000)) is not None
    assert times.expected((8192, 0)) is None
    times.observe(forward(512))
    assert times.expected((8192, 0)) is not None


def test_times_when_prompts_are_computed_in_chunks_then_forwards_of_a_whole_chunk_tell_of_the_longest():
    times = PrefillTimes(chunk_tokens=2048)
    for _ in range(32):
        times.observe(forward(2048))
    assert times.expected((1 << 20, 0)) is not None


def test_times_when_the_cost_is_known_beforehand_then_it_holds_for_every_length():
    times = PrefillTimes(COST)
    times.observe(forward(1))
    assert times.expected((8192, 0))[0] == pytest.approx(COST.time_us([(8192, 0)]))


@pytest.mark.parametrize("piece", [(100, 0), (512, 0), (513, 7), (2048, 0), (5000, 300), (0, 64)])
def test_times_when_a_prompt_has_several_chunks_then_each_is_a_forward(piece):
    cost = PrefillCost(fixed_us=1000.0, token_us=100.0, pair_us=0.01, context_us=0.5, masked_us=0.02)
    times = PrefillTimes(cost, chunk_tokens=512)
    for _ in range(20):
        times.observe(ForwardSample(((512, 0),), 2 * cost.time_us([(512, 0)])))
    num_tokens, prefix = piece
    chunks = [(min(512, num_tokens - at), prefix + at) for at in range(0, num_tokens, 512)]
    each_us = [2 * cost.time_us([chunk]) for chunk in chunks]
    time_us, _, first_us = times.expected(piece)
    assert (time_us, first_us) == pytest.approx((sum(each_us), sum(each_us[:1])))
