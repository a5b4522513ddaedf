# SPDX-License-Identifier: Apache-2.0
"""``make lock``, without an index."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_lock_when_it_is_made_again_then_newer_versions_are_taken():
    """uv keeps what the file pins already, unless it is told otherwise."""
    said = subprocess.run(["make", "-n", "lock"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "uv pip compile" in said and "--upgrade" in said
