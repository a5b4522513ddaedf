# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import ThreadPoolExecutor

import pytest

from banyan.routing import Reason
from banyan.telemetry import DESCRIPTIONS, Counters, LayerClock, Stopwatch
from banyan.telemetry.stopwatch import SAMPLED


class FakeClock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        self.now_ns += 1000
        return self.now_ns


def test_stopwatch_when_timed_calls_nest_then_time_counts_once():
    watch = Stopwatch(FakeClock())
    inner = watch.wrap("inner", lambda: None)
    watch.wrap("outer", inner)()
    # The outer one looks at the clock first and last, and of its 3 us the inner one has 1.
    own_us = {name: spent.own_ns // 1000 for name, spent in watch.by_name().items()}
    assert own_us == {"inner": 1, "outer": 2}
    assert watch.elapsed_ns == 3000


def test_stopwatch_when_what_is_not_ours_runs_then_its_time_is_nobodys_but_for_what_is_timed_within_it():
    clock = FakeClock()
    watch = Stopwatch(clock)
    within = watch.wrap("within", lambda: None)

    def theirs():
        clock.now_ns += 50_000
        within()
        return "answer"

    assert watch.wrap("around", lambda: watch.elsewhere(theirs)())() == "answer"
    own_us = {name: spent.own_ns // 1000 for name, spent in watch.by_name().items()}
    assert own_us == {"around": 2, "within": 1}


def test_stopwatch_when_another_thread_calls_then_it_is_not_timed():
    watch = Stopwatch(FakeClock())
    timed = watch.wrap("hook", lambda: "answer")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(timed).result() == "answer"
        assert pool.submit(watch.elsewhere(timed)).result() == "answer"
    assert watch.elapsed_ns == 0
    assert watch.by_name() == {}


def test_stopwatch_when_the_call_raises_then_time_counts_and_the_error_passes():
    watch = Stopwatch(FakeClock())

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        watch.wrap("fails", fail)()
    assert watch.elapsed_ns == 1000


def test_stopwatch_when_calls_are_sampled_then_one_is_timed_and_counts_for_all():
    watch = Stopwatch(FakeClock())
    sampled = watch.sample("each stream", lambda: "answer")
    assert [sampled() for _ in range(2 * SAMPLED - 1)] == ["answer"] * (2 * SAMPLED - 1)
    spent = watch.by_name()["each stream"]
    assert (spent.num_calls, spent.own_ns) == (SAMPLED, 1000 * SAMPLED)


def test_layer_clock_when_k_and_v_tick_then_a_forward_counts_once():
    counters = Counters()
    clock = LayerClock(num_layers=2, counters=counters, clock=FakeClock())
    clock.begin()
    for layer in (0, 0, 1, 1):
        clock.tick(layer)
    assert (counters.forwards, counters.forward_us) == (1, 2)


def test_layer_clock_when_layers_wait_for_kv_then_the_time_of_a_layer_is_compute_time_only():
    ended = []
    clock = LayerClock(num_layers=5, counters=Counters(), clock=FakeClock(), ended=ended.append)
    clock.begin()
    clock.tick(0, waited_s=1.0)
    for layer in (1, 2, 3):
        clock.tick(layer, waited_s=1e-7)
    clock.tick(4)
    # The fake clock gains a microsecond each time it is read: at the first tick and at the end.
    assert ended == [pytest.approx((1.0 - 3 * 0.1) / 4)]


def test_layer_clock_when_a_forward_never_ends_then_the_next_one_replaces_it():
    counters = Counters()
    ended = []
    clock = LayerClock(num_layers=2, counters=counters, clock=FakeClock(), ended=ended.append)
    clock.begin()
    clock.tick(0)
    clock.begin()
    clock.tick(1)
    assert counters.forwards == 1
    assert ended == [], "without its first layer, a forward gives no time of one"


def test_descriptions_when_a_counter_is_added_then_it_is_described():
    assert set(DESCRIPTIONS) == set(Counters().as_dict())


@pytest.mark.parametrize("reason", Reason)
def test_placements_when_counted_then_every_reason_has_its_counter(reason):
    counters = Counters()
    counters.count_placed(reason.value)
    assert counters.as_dict()[f"placed_{reason}"] == 1
