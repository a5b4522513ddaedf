# SPDX-License-Identifier: Apache-2.0
"""When may the store be read and written, and what is worth a write. Pure.

A page's way down: ``WriteAdmission`` (is it worth a write, within ``WriteBudget``?) -> the store's back-log, bounded ->
the store's gate (reads first, at most two writes, and none while ``WritePause`` says that a prefill runs).

Back-log and gate are native, since every I/O asks them (banyan-store, ``pacing.rs``). The simulator asks the same gate
(``banyan._native.WriteGate``) and the same pause.
"""

from banyan.pacing.admission import Admission, WriteAdmission, WriteVerdict
from banyan.pacing.budget import WriteBudget
from banyan.pacing.correction import Correction, length_class, nearest, shortest_of_class
from banyan.pacing.write_pause import WritePause

__all__ = [
    "Admission",
    "Correction",
    "WriteAdmission",
    "WriteBudget",
    "WritePause",
    "WriteVerdict",
    "length_class",
    "nearest",
    "shortest_of_class",
]
