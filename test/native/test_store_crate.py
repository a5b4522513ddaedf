# SPDX-License-Identifier: Apache-2.0
"""The native store's own tests: formats, policies, devices, one store, several writers on one path."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.native


def test_store_crate_when_tested_then_passes() -> None:
    cargo = shutil.which("cargo")
    assert cargo, "cargo is not installed"
    done = subprocess.run(
        [cargo, "test", "-q", "--profile", "tested", "-p", "banyan-store", "--manifest-path", "sgl-kernel/Cargo.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
