# SPDX-License-Identifier: Apache-2.0
"""Runs the loom models of the lease protocol: every interleaving of the code that ships."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

WORKSPACE = Path(__file__).resolve().parents[2] / "sgl-kernel"

pytestmark = pytest.mark.native


def test_lease_protocol_when_every_interleaving_is_tried_then_sound() -> None:
    command = ["cargo", "test", "--release", "-j2", "-p", "banyan-shm", "--test", "loom"]
    env = {**os.environ, "RUSTFLAGS": "--cfg loom", "CARGO_TARGET_DIR": str(WORKSPACE / "target" / "loom")}
    done = subprocess.run(command, cwd=WORKSPACE, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # The broken copies of the protocol must have run, and have failed as they should.
    assert "fences_are_removed_then_loom_finds_the_torn_page - should panic ... ok" in done.stdout
    assert "0 failed; 0 ignored" in done.stdout
