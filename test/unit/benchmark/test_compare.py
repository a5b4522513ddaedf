# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import Iterator

import pytest
from bench_fakes import WordTokenizer, run_result

from benchmark import compare
from benchmark.compare import Target, measure_alternately, order_of_repetition
from benchmark.load import Arrivals
from benchmark.measure import RunResult, Workload


class Sleepy:
    """Notes in a shared log when it is put to sleep or woken."""

    def __init__(self, label: str, log: list[str]) -> None:
        self._label = label
        self._log = log

    def asleep(self) -> None:
        self._log.append(f"{self._label} sleeps")

    def awake(self) -> None:
        self._log.append(f"{self._label} wakes")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happens, in order; measuring and flushing only leave a note."""
    notes: list[str] = []

    async def flush(url: str) -> None:
        notes.append(f"flush {url}")

    async def measure(label: str, url: str, workload: Workload, **options: object) -> list[RunResult]:
        notes.append(f"measure {label}")
        repetition = options["repetition"]
        assert isinstance(repetition, int)
        return [run_result(label, run, repetition) for run in (1, 2)]

    async def no_sleep(seconds: float) -> None: ...

    monkeypatch.setattr(compare, "flush_cache", flush)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare.asyncio, "sleep", no_sleep)
    yield notes


def test_order_when_repeated_then_each_is_first_in_turn() -> None:
    orders = [order_of_repetition(["a", "b", "c"], repetition) for repetition in (1, 2, 3, 4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_alternation_when_two_servers_then_only_the_measured_one_is_awake(log: list[str]) -> None:
    targets = [Target(label, f"http://{label}", Sleepy(label, log)) for label in ("off", "on")]
    workload = Workload((), WordTokenizer(), Arrivals(), seed=0)
    results = asyncio.run(measure_alternately(targets, workload, 2))
    one = ["on sleeps", "off wakes", "flush http://off", "measure off"]
    two = ["off sleeps", "on wakes", "flush http://on", "measure on"]
    assert log == [*one, *two, *two, *one, "off wakes", "on wakes"]
    assert [result.summary["first_in_repetition"] for result in results] == ["off"] * 4 + ["on"] * 4
    assert [result.summary["place_in_repetition"] for result in results] == [1, 1, 2, 2, 1, 1, 2, 2]


def test_alternation_when_labels_repeat_then_refused() -> None:
    twins = [Target("a", "http://x"), Target("a", "http://y")]
    with pytest.raises(ValueError, match="labels must differ"):
        asyncio.run(measure_alternately(twins, Workload((), WordTokenizer(), Arrivals(), seed=0), 1))
