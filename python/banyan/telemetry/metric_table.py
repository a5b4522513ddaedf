# SPDX-License-Identifier: Apache-2.0
"""Under which name, as what and in which unit ``/metrics`` shows a figure of ``/server_info``: Prometheus' conventions.

What only grows is a counter and ends with ``_total``; times are in seconds. ``/server_info`` and the code count
microseconds, in whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from banyan.telemetry.counters import DESCRIPTIONS
from banyan.telemetry.gauges import (
    GAUGES,
    STATE_COUNTERS,
    STORE_COUNTERS,
    STORE_GAUGES,
    STORE_PREFIX,
    TOLD_COUNTERS,
    TOLD_GAUGES,
    TOLD_PREFIX,
)

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


def _behind(prefix: str, texts: Mapping[str, str]) -> dict[str, str]:
    return {prefix + name: text for name, text in texts.items()}


_COUNTERS = {
    **DESCRIPTIONS,
    **STATE_COUNTERS,
    **_behind(STORE_PREFIX, STORE_COUNTERS),
    **_behind(TOLD_PREFIX, TOLD_COUNTERS),
}
_GAUGES = {**GAUGES, **_behind(STORE_PREFIX, STORE_GAUGES), **_behind(TOLD_PREFIX, TOLD_GAUGES)}

SERIES = {
    **{name: _counter(name, text) for name, text in _COUNTERS.items()},
    **{name: Metric(PREFIX + name, text, False) for name, text in _GAUGES.items()},
}
"""By the names that figures have in the code."""
