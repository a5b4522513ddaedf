# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.pacing import ForwardShape, LayerTimes, SlackTable, WritePermits

TIMES = LayerTimes(SlackTable((100,), (0,), ((200.0,),)))
PREFILL = ForwardShape(100, 0)


class Store:
    def __init__(self):
        self.told = []

    def pause_writes(self):
        self.told.append("pause")

    def set_write_budget(self, num_bytes):
        self.told.append(num_bytes)

    def open_writes(self):
        self.told.append("open")


def permits(store, *, times=TIMES, block_bytes=1000):
    return WritePermits(store, times=times, num_layers=10, block_bytes=block_bytes, write_bytes_per_us=lambda: 5.0)


@pytest.mark.parametrize(
    ("options", "num_stored_tokens", "told"),
    [({}, 0, 10_000), ({}, 16, "pause"), ({"times": None}, 0, "pause"), ({"block_bytes": 20_000}, 0, "pause")],
    ids=["within its time", "it reads itself", "no profile", "too short for a block"],
)
def test_prefill_when_it_runs_then_the_store_is_told_what_fits_and_opened_behind_it(options, num_stored_tokens, told):
    store = Store()
    ours = permits(store, **options)
    ours.begin_prefill(PREFILL, num_stored_tokens=num_stored_tokens)
    ours.end()
    assert store.told == [told, "open"]


def test_decode_when_steps_follow_each_other_then_the_store_stays_open():
    store = Store()
    ours = permits(store)
    for _ in range(3):
        ours.end()
    assert store.told == []


def test_prefill_when_it_never_ended_then_the_next_one_replaces_it():
    store = Store()
    ours = permits(store)
    ours.begin_prefill(PREFILL, num_stored_tokens=1)
    ours.begin_prefill(PREFILL, num_stored_tokens=0)
    ours.end()
    ours.end()
    assert store.told == ["pause", 10_000, "open"]


def test_prefill_when_forwards_proved_faster_then_less_is_allowed():
    times = LayerTimes(SlackTable((100,), (0,), ((200.0,),)))
    for _ in range(10):
        times.observe(PREFILL, 100.0)
    store = Store()
    permits(store, times=times).begin_prefill(PREFILL, num_stored_tokens=0)
    assert store.told == [5000]


@pytest.mark.parametrize("wrong", [{"block_bytes": 0}])
def test_permits_when_a_size_is_none_then_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        permits(Store(), **wrong)
