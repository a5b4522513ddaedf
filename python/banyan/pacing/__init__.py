# SPDX-License-Identifier: Apache-2.0
"""When may the store be read and written, and what is worth a write. Pure.

A server decides here what is worth a write (``WriteAdmission``, ``WriteBudget``) and when a forward leaves room for one
(``WritePermits``, ``LayerTimes``). Its back-log and gate are native, since every I/O asks them (banyan-store,
``pacing.rs``); ``PacedWrites`` and ``ForwardSlack`` are the same rules for the simulator, which has no device.

A page's way down: ``WriteAdmission`` (is it worth a write?) -> ``PacedWrites`` (a bounded back-log) -> the gate (reads
first, then only in slack). Slack comes from ``ForwardSlack``, which reads ``LayerTimes``: the profiled ``SlackTable``,
corrected by the per-layer clock.
"""

from banyan.pacing.admission import Admission, Verdict, WriteAdmission
from banyan.pacing.budget import WriteBudget
from banyan.pacing.correction import Correction, length_class, nearest, shortest_of_class
from banyan.pacing.forward import ForwardSlack
from banyan.pacing.gate import MAX_WRITE_DEPTH, DeviceLoad, num_writes_allowed
from banyan.pacing.layer_times import LayerTimes
from banyan.pacing.permits import PermittedStore, WritePermits
from banyan.pacing.slack_table import ForwardShape, SlackTable
from banyan.pacing.writes import PacedWrites, PageWrite

__all__ = [
    "MAX_WRITE_DEPTH",
    "Admission",
    "Correction",
    "DeviceLoad",
    "ForwardShape",
    "ForwardSlack",
    "LayerTimes",
    "PacedWrites",
    "PageWrite",
    "PermittedStore",
    "SlackTable",
    "Verdict",
    "WriteAdmission",
    "WriteBudget",
    "WritePermits",
    "length_class",
    "nearest",
    "num_writes_allowed",
    "shortest_of_class",
]
