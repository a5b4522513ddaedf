# SPDX-License-Identifier: Apache-2.0
"""When may the store be read and written, and what is worth a write. Pure.

A page's way down: ``WriteAdmission`` (is it worth a write, within an ``Allowance``?) -> the store's back-log, which is
bounded -> the store's gate (reads first, at most two writes, and none while ``WritePause`` says that a prefill runs).

Back-log and gate are native, since every I/O asks them (banyan-store, ``pacing.rs``). The simulator asks the same gate
(``banyan._native.WriteGate``) and the same pause.
"""
