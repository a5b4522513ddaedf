# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from banyan.planner import ForwardSample, PrefillCost, PrefillTimes
from banyan.planner.quota import QuotaMeter

PAGE = 16
COST = PrefillCost(fixed_us=1000.0, token_us=100.0, pair_us=0.01, context_us=0.0)


def meter(quota_us, times=None):
    return QuotaMeter(times or PrefillTimes(COST), quota_us=quota_us, page_tokens=PAGE)


def pack(ours, queue):
    """The pieces that a forward takes from ``(wanted, prefix)`` requests in order."""
    taken = []
    for wanted, prefix in queue:
        if ours.is_spent:
            break
        extend = ours.allow(prefix, wanted)
        if extend:
            ours.take((extend, prefix))
            taken.append((extend, prefix))
    return taken


def test_pack_when_requests_fit_then_all_are_taken_whole():
    ours = meter(100_000.0)
    assert pack(ours, [(100, 0), (37, 500), (1, 2000)]) == [(100, 0), (37, 500), (1, 2000)]
    assert not ours.is_spent


def test_pack_when_one_does_not_fit_then_it_is_cut_at_a_page_and_nobody_follows():
    taken = pack(meter(50_000.0), [(100, 0), (1000, 0), (1, 0)])
    assert taken[0] == (100, 0) and len(taken) == 2
    extend, _ = taken[1]
    assert 0 < extend < 1000 and extend % PAGE == 0
    assert COST.time_us(taken) <= 50_000.0 < COST.time_us([(100, 0), (extend + PAGE, 0)])


def test_pack_when_the_prefix_is_longer_then_the_chunk_is_shorter():
    (short,), (long,) = (pack(meter(50_000.0), [(5000, prefix)]) for prefix in (0, 50_000))
    assert long[0] < short[0]


def test_pack_when_the_quota_is_tiny_then_the_first_request_still_gets_a_page():
    assert pack(meter(1.0), [(100, 0), (100, 0)]) == [(PAGE, 0)]
    assert pack(meter(1.0), [(5, 0), (5, 0)]) == [(5, 0)]


def test_pack_when_nothing_more_fits_then_the_next_gets_nothing():
    ours = meter(COST.time_us([(100, 0)]) + 1)
    assert pack(ours, [(100, 0), (100, 0)]) == [(100, 0)]
    assert ours.is_spent


def test_pack_when_one_token_would_be_left_then_it_goes_along():
    fitting = COST.time_us([(4 * PAGE, 0)])
    assert pack(meter(fitting), [(4 * PAGE + 1, 0), (1, 0)]) == [(4 * PAGE + 1, 0)]
    assert pack(meter(fitting), [(4 * PAGE + 2, 0), (1, 0)]) == [(4 * PAGE, 0)]


def test_pack_when_the_profiles_fixed_cost_is_far_too_small_then_chunks_grow_again():
    """A page at a time would keep within the quota too, and never show that four pages take no longer."""
    truth = PrefillCost(fixed_us=30_000.0, token_us=100.0, pair_us=0.01, context_us=0.0)
    times, chunks = PrefillTimes(COST), []
    times.observe(ForwardSample(((PAGE, 0),), truth.time_us([(PAGE, 0)])))
    for _ in range(30):
        (piece,) = pack(meter(50_000.0, times), [(5000, 0)])
        times.observe(ForwardSample((piece,), truth.time_us([piece])))
        chunks.append(piece[0])
    assert chunks[-1] >= 4 * PAGE and truth.time_us([(chunks[-1], 0)]) <= 50_000.0
    assert max(truth.time_us([(chunk, 0)]) for chunk in chunks) <= 1.2 * 50_000.0


def test_pack_when_times_are_not_known_then_nothing_is_cut():
    assert pack(meter(1.0, PrefillTimes()), [(5000, 0), (5000, 0)]) == [(5000, 0), (5000, 0)]


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 50_000)), max_size=8), st.floats(1.0, 1e6))
def test_pack_when_any_queue_comes_then_the_quota_holds_or_one_page_is_all(queue, quota_us):
    taken = pack(meter(quota_us), queue)
    assert bool(taken) == bool(queue)
    if queue and COST.time_us(taken) > quota_us:
        *before, (extend, prefix) = taken
        # The first request's page, or the one token that goes along.
        is_first_page = not before and extend <= PAGE + 1
        assert is_first_page or COST.time_us([*before, (extend - 1, prefix)]) <= quota_us
    for (extend, prefix), (wanted, asked_prefix) in zip(taken, queue, strict=False):
        assert prefix == asked_prefix
        assert extend == wanted or (extend % PAGE == 0 and (extend, prefix) == taken[-1])
