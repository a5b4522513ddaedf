# SPDX-License-Identifier: Apache-2.0
"""When may the store be read and written, and what is worth a write. Pure.

A page's way down: ``WriteAdmission`` (is it worth a write, within ``WriteBudget``?) -> the store's back-log, bounded ->
the store's gate (reads first, at most two writes, within the permit). The permit comes from ``WritePermits``, which
reads ``LayerTimes``, the profiled ``SlackTable``, corrected by the per-layer clock, and the ``WriteRate`` of the drive.

Back-log and gate are native, since every I/O asks them (banyan-store, ``pacing.rs``). The simulator asks the same gate
(``banyan._native.WriteGate``) and the same permits.
"""

from banyan.pacing.admission import Admission, WriteAdmission, WriteVerdict
from banyan.pacing.budget import WriteBudget
from banyan.pacing.corrected_table import LayerTimes
from banyan.pacing.correction import Correction, length_class, nearest, shortest_of_class
from banyan.pacing.permits import CountingStore, PermittedStore, WritePermits
from banyan.pacing.slack_table import ForwardShape, SlackTable
from banyan.pacing.write_rate import WriteRate

__all__ = [
    "Admission",
    "Correction",
    "CountingStore",
    "ForwardShape",
    "LayerTimes",
    "PermittedStore",
    "SlackTable",
    "WriteAdmission",
    "WriteBudget",
    "WritePermits",
    "WriteRate",
    "WriteVerdict",
    "length_class",
    "nearest",
    "shortest_of_class",
]
