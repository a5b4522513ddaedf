# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu-check`` asks about streams, on a fake device that has few queues, or many."""

import itertools
from types import SimpleNamespace

import pytest
from test.gpu import streams
from test.gpu.streams import HeldUp, Start, answer, held_up, start_of_next
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

COPY, FORWARD = 1, 2


class FewQueues(FakeGpu):
    """Streams share queues: what is behind a wait in its queue waits as well."""

    num_queues = 8

    def enqueue(self, stream, *arguments):
        super().enqueue(stream % self.num_queues, *arguments)


@pytest.fixture(autouse=True)
def time_of_looks(monkeypatch):
    """Patience ends after so many looks, however long they take: all that can run has run by then."""
    looks = itertools.count(step=streams.PATIENCE_S / 1000)
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: next(looks)))


@pytest.mark.parametrize(("gpu", "num_late"), [(FakeGpu(0), 0), (FewQueues(0), 4)], ids=["a queue each", "8 queues"])
def test_streams_when_they_share_the_queue_of_one_that_waits_then_they_are_counted(gpu, num_late):
    found = held_up(FakeDriver(gpu), [COPY], range(100, 132), gpu.step, "plain")
    assert found == HeldUp("plain", 1, 32, num_late)


def test_streams_when_they_do_not_go_on_with_the_word_then_an_error(monkeypatch):
    gpu = FakeGpu(0)
    driver = FakeDriver(gpu)
    monkeypatch.setattr(driver, "copy_async", lambda *args: gpu.enqueue(args[-1], lambda: None, lambda: False))
    with pytest.raises(RuntimeError, match="did not go on"):
        held_up(driver, [COPY], [100], gpu.step, "plain")


@pytest.mark.parametrize("is_behind", [True, False])
def test_next_forward_when_a_copy_is_under_way_then_it_waits_for_its_first_layers_alone(is_behind):
    copies_first = 0
    for seed in range(20):
        gpu = FakeGpu(seed)
        driver, done = FakeDriver(gpu), []
        found = start_of_next(
            driver,
            forward_stream=FORWARD,
            copy_stream=COPY,
            forward=lambda gpu=gpu, done=done: [
                gpu.enqueue(FORWARD, lambda layer=layer: done.append(f"forward {layer}")) for layer in range(5)
            ],
            copies=[
                lambda gpu=gpu, done=done, n=n: gpu.enqueue(COPY, lambda: done.append(f"copy {n}")) for n in range(3)
            ],
            is_behind=is_behind,
            settle=gpu.run,
        )
        assert 0 < found.in_flight_s <= found.next_s
        copies_first += done.index("copy 0") < done.index("forward 4")
        if is_behind:
            assert done == [*(f"forward {n}" for n in range(5)), *(f"copy {n}" for n in range(3))]
    assert bool(copies_first) is not is_behind


def test_answer_when_something_is_held_up_and_a_copy_pays_beside_a_forward_then_both_are_said():
    held = [HeldUp("in a partition", 1, 32, 0), HeldUp("plain", 1, 32, 4)]
    line = answer(held, [Start(0.020, 0.026)], [Start(0.021, 0.0215)])
    assert "hold up others" in line and "4 of 32 (1 plain)" in line
    assert "4.50 ms earlier" in line and "slows the first by 1.00 ms: worth a rule" in line


def test_answer_when_nothing_is_held_up_and_little_is_gained_then_it_says_so():
    line = answer([HeldUp("plain", 1, 32, 0)], [Start(0.020, 0.0205)], [Start(0.020, 0.0202)])
    assert "hold up nobody" in line and "not worth a rule" in line
