# SPDX-License-Identifier: Apache-2.0
"""``make test``, whose pytest stands in for one."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
PYTEST = """#!/bin/sh
trap 'exit 2' INT
echo "$@" >>"$(dirname "$0")/asked"
sleep 60
"""


def test_tests_when_ctrl_c_ends_them_then_neither_half_begins_another_part(tmp_path: Path) -> None:
    for name in ("scripts", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    script, pytest, asked = tmp_path / "scripts/test.sh", tmp_path / ".venv/bin/python", tmp_path / ".venv/bin/asked"
    shutil.copy(ROOT / "scripts/test.sh", script)
    pytest.write_text(PYTEST)
    pytest.chmod(0o755)
    # Whoever runs the tests may have told them to ignore Ctrl-C.
    command = ["env", "--default-signal=INT", str(script)]
    tests = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline_s = time.monotonic() + 30
    while not (asked.exists() and asked.read_text().count("\n") == 2) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    os.killpg(tests.pid, signal.SIGINT)
    assert tests.wait(30) == 130
    time.sleep(0.5)
    assert asked.read_text().count("-m pytest") == 2
