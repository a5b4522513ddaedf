# SPDX-License-Identifier: Apache-2.0
"""Under which name, as what and in which unit ``/metrics`` shows a figure of ``/server_info``: Prometheus' conventions.

What only grows is a counter and ends with ``_total``; times are in seconds. ``/server_info`` and the code count
microseconds, in whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from banyan.telemetry.counters import DESCRIPTIONS
from banyan.telemetry.gauges import SECTIONS

PREFIX = "banyan:"
MICROSECONDS = "_us"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name``: as queries have it. ``scale``: from the figure to what is shown."""

    name: str
    text: str
    is_counter: bool
    scale: float = 1.0


def _counter(name: str, text: str) -> Metric:
    stem = name.removeprefix("num_")
    if stem.endswith(MICROSECONDS):
        return Metric(f"{PREFIX}{stem.removesuffix(MICROSECONDS)}_seconds_total", text, True, 1e-6)
    return Metric(f"{PREFIX}{stem}_total", text, True)


def _in_seconds(name: str) -> str:
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


def _series() -> Iterator[tuple[str, Metric]]:
    for name, text in DESCRIPTIONS.items():
        yield name, _counter(name, text)
    for prefix, (gauges, counters) in SECTIONS.items():
        for name, text in gauges.items():
            yield prefix + name, Metric(PREFIX + prefix + _in_seconds(name), text, False)
        for name, text in counters.items():
            yield prefix + name, _counter(prefix + name, text)


SERIES = dict(_series())
"""By the names that figures have in the code."""
