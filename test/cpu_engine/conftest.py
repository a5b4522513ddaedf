# SPDX-License-Identifier: Apache-2.0
"""Tests that import SGLang, in this process and without a server."""

import os

import pytest

from banyan.config import CPU_ISA_WITHOUT_AMX

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Read when torch first multiplies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", CPU_ISA_WITHOUT_AMX)


@pytest.fixture(autouse=True)
def hooks_in_place(monkeypatch):
    """Whoever makes an attention backend in this process finds the hooks of a scheduler."""
    from banyan_cpu_engine import seam

    monkeypatch.setattr(seam, "verify", lambda process: None)
