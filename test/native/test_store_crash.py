# SPDX-License-Identifier: Apache-2.0
"""A short run of ``make crash``: killed writers, power cuts and lying devices. Any failure names its seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_SEEDS = 25

pytestmark = pytest.mark.native


def test_store_when_writers_die_at_random_then_nothing_is_wrong_or_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/harness.py", "crash", "--seeds", str(NUM_SEEDS), "--dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"{NUM_SEEDS} passed, 0 failed"
