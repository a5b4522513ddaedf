# SPDX-License-Identifier: Apache-2.0
"""The native crates' own tests: the directory and its leases, copies and histories; the store's formats, policies and
devices, one store and several writers on one path. (``test_loom`` has the models of the lease protocol.)"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRATES = ("banyan-shm", "banyan-store", "banyan-lab")

pytestmark = pytest.mark.native


def test_crates_when_tested_then_each_passes() -> None:
    cargo = shutil.which("cargo")
    assert cargo, "cargo is not installed"
    crates = [word for crate in CRATES for word in ("-p", crate)]
    done = subprocess.run(
        [cargo, "test", "--profile", "tested", *crates, "--manifest-path", "sgl-kernel/Cargo.toml"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    for crate in CRATES:
        # A suite that is compiled without its tests ends well, too.
        of_the_library = rf"/{crate.replace('-', '_')}-\w+\)\s+running [1-9]"
        assert re.search(of_the_library, done.stdout), f"no test of {crate} has run"
