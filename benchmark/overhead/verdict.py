# SPDX-License-Identifier: Apache-2.0
"""What rounds in turns say together: medians of the ratios within each round, and what of them is beyond its bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from banyan_lab.bench.hooks import Spent
from benchmark.metrics import paired_ratio
from benchmark.overhead.cases import Case
from benchmark.overhead.play import ASKED, Round

LEAST_THROUGHPUT = 0.99
MOST_TIME = 1.01
MOST_SCHEDULER_US = {512: 60.0, 100_000: 2_000.0}
"""Of the scheduler's thread for a request, by its tokens."""

MOST_STEP_US = 5.0
"""Of the scheduler's thread for a decode step, whatever the number of streams."""

MOST_DISPATCHER_US = 100.0
MOST_CALL_US = 60.0
"""Of any hook, for one call."""


def compared(case: Case, on: Sequence[Round], off: Sequence[Round]) -> dict[str, Any]:
    """One case: ``on`` against ``off``, round by round, and what Banyan takes itself."""

    def ratio(figure: str) -> dict[str, Any] | None:
        return paired_ratio([getattr(one, figure) for one in on], [getattr(one, figure) for one in off])

    row: dict[str, Any] = {
        "case": case.name,
        "throughput": ratio("requests_per_s"),
        "ttft": ratio("ttft_s"),
        "step": ratio("step_s") if case.is_of_streams else None,
        "off": {"requests_per_s": _median(off, "requests_per_s"), "ttft_s": _median(off, "ttft_s")},
        "scheduler_us": _median(on, "scheduler_us"),
        "dispatcher_us": _median(on, "dispatcher_us"),
        "scheduler_step_us": _median(on, "step_us") if case.is_of_streams else None,
        "cpu_us": {
            kind: {name: median(one.cpu_us[kind] for one in rounds) for name, rounds in (("on", on), ("off", off))}
            for kind in on[0].cpu_us
        },
        "hooks": _hooks(on),
    }
    if case.is_of_streams:
        row["off"]["step_s"] = _median(off, "step_s")
    return row | {"above": above(case, row)}


def above(case: Case, row: Mapping[str, Any]) -> list[str]:
    """Each figure that is beyond its bound."""
    found = []
    if row["throughput"]["median"] < LEAST_THROUGHPUT:
        found.append(f"throughput is {row['throughput']['median']:.3f}, not {LEAST_THROUGHPUT}")
    for time in ("ttft", "step") if case.is_of_streams else ("ttft",):
        if row[time]["median"] > MOST_TIME:
            found.append(f"{time} is {row[time]['median']:.3f}, not {MOST_TIME}")
    limits = [
        ("dispatcher_us", MOST_DISPATCHER_US if case.prompt_tokens <= 512 else None),
        ("scheduler_us", MOST_SCHEDULER_US.get(case.prompt_tokens)),
        ("scheduler_step_us", MOST_STEP_US if case.is_of_streams else None),
    ]
    found += [
        f"{name} is {row[name]:.0f}, not {most:.0f}" for name, most in limits if most is not None and row[name] > most
    ]
    if case.prompt_tokens <= 512:
        slow = {
            name: hook["us_a_call"]
            for name, hook in row["hooks"].items()
            if hook["us_a_call"] > MOST_CALL_US and name != ASKED
        }
        found += [f"{name} takes {took:.0f} us a call, not {MOST_CALL_US:.0f}" for name, took in slow.items()]
    return found


def _median(rounds: Sequence[Round], figure: str) -> float:
    return median(getattr(one, figure) for one in rounds)


def _hooks(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    found: dict[str, list[Spent]] = {}
    for one in rounds:
        for name, spent in one.costs.hooks.items():
            found.setdefault(name, []).append(spent)
    return {
        name: {
            "num_calls": median(one.num_calls for one in spent),
            "us_a_call": median(one.us_a_call for one in spent),
        }
        for name, spent in sorted(found.items())
    }
