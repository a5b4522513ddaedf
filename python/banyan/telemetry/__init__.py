# SPDX-License-Identifier: Apache-2.0
"""Counters of what happened, and the clocks that say what it cost."""

from banyan.telemetry.counters import DESCRIPTIONS, Counters
from banyan.telemetry.estimate import Estimate
from banyan.telemetry.layer_clock import LayerClock
from banyan.telemetry.stopwatch import Stopwatch

__all__ = ["DESCRIPTIONS", "Counters", "Estimate", "LayerClock", "Stopwatch"]
