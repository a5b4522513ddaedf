# SPDX-License-Identifier: Apache-2.0
"""Counters of what happened, and the clocks that say what it cost."""

from banyan.telemetry.changing_lines import ChangingLines, Parting
from banyan.telemetry.computed import Why, why_computed
from banyan.telemetry.copy_sample import Copies, CopySample
from banyan.telemetry.counters import DESCRIPTIONS, Counters
from banyan.telemetry.dropped import Dropped
from banyan.telemetry.estimate import Estimate
from banyan.telemetry.gauges import WINDOW_MINUTES, gauges_of
from banyan.telemetry.json_lines import log_as_json
from banyan.telemetry.layer_clock import LayerClock
from banyan.telemetry.mean_copies import MeanCopies
from banyan.telemetry.metric_table import SERIES
from banyan.telemetry.node_reuse import PAGE_BYTES, NodeReuse, PromptAnswer
from banyan.telemetry.pseudonyms import Pseudonyms, rid_pseudonym
from banyan.telemetry.recent_prompts import Holding, RecentPrompts
from banyan.telemetry.stopwatch import Stopwatch
from banyan.telemetry.threads import notice, num_ended, one_thread, start_thread

__all__ = [
    "DESCRIPTIONS",
    "PAGE_BYTES",
    "SERIES",
    "WINDOW_MINUTES",
    "ChangingLines",
    "Copies",
    "CopySample",
    "Counters",
    "Dropped",
    "Estimate",
    "Holding",
    "LayerClock",
    "MeanCopies",
    "NodeReuse",
    "Parting",
    "PromptAnswer",
    "Pseudonyms",
    "RecentPrompts",
    "Stopwatch",
    "Why",
    "gauges_of",
    "log_as_json",
    "notice",
    "num_ended",
    "one_thread",
    "rid_pseudonym",
    "start_thread",
    "why_computed",
]
