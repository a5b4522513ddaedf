# SPDX-License-Identifier: Apache-2.0
"""Forked servers: what is asked of the process that they are forked from, and what its answers mean."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark.warm import Fork, Nursery

ROOT = Path(__file__).parents[3]
NURSERY = """
import sys
from benchmark import warm
warm.MODULES, warm.CHANGES, warm.SERVER, warm._fork_children = (), (), "idle_server", lambda: None
warm.main(int(sys.argv[1]))
"""
"""A process that servers are forked from, without SGLang."""

STARTER = f"""
import subprocess, sys, time
from pathlib import Path
from benchmark import warm

def begin(nursery, variables):
    ours, theirs = warm.socket.socketpair()
    with theirs:
        made = subprocess.Popen([sys.executable, "-c", {NURSERY!r}, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    print(made.pid, flush=True)
    return ours

warm.Nursery._begin = begin
print(warm.NURSERY.start({{}}, [], Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def started(tmp_path):
    """Who starts servers, the process that they are forked from, and one of them."""
    (tmp_path / "idle_server.py").write_text("import time\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}:{tmp_path}"}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, env=environment
    )
    pids = [int(starter.stdout.readline()) for _ in range(2)]
    yield starter, *pids
    for pid in (starter.pid, *pids):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    starter.wait()


def wait_for_end(pids):
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def test_server_when_who_started_it_is_killed_then_it_ends_and_so_does_what_it_was_forked_from(started):
    starter, nursery, server = started
    assert is_running(nursery) and is_running(server)
    starter.kill()
    assert wait_for_end([nursery, server]) == []


def test_server_when_what_it_was_forked_from_is_killed_then_it_ends(started):
    _, nursery, server = started
    os.kill(nursery, signal.SIGKILL)
    assert wait_for_end([server]) == []


class Answering(Nursery):
    """A nursery whose process answers from a list."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)
        self.asked = []

    def ask(self, request):
        self.asked.append(request)
        return self.answers.pop(0)

    def _begin(self, variables):
        return object()


def test_server_when_it_is_started_then_its_flags_and_variables_are_told(tmp_path):
    nursery = Answering({"pid": 7})
    fork = nursery.start({"A": "1"}, ["--dp", "2"], tmp_path / "log")
    assert fork.pid == 7
    assert nursery.asked == [{"arguments": ["--dp", "2"], "variables": {"A": "1"}, "log": str(tmp_path / "log")}]


def test_server_when_its_imports_would_have_read_other_variables_then_it_is_not_started(tmp_path):
    nursery = Answering({"pid": 7})
    nursery.start({"OMP_NUM_THREADS": "1"}, [], tmp_path / "log")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        nursery.start({"OMP_NUM_THREADS": "2"}, [], tmp_path / "log")


def test_fork_when_it_has_ended_then_its_code_is_remembered():
    fork = Fork(Answering({"returncode": None}, {"returncode": 3}), 7)
    assert fork.poll() is None and fork.wait(1) == 3
    assert fork.poll() == 3, "it is not asked about again"


def test_fork_when_it_does_not_end_in_time_then_the_wait_does():
    with pytest.raises(subprocess.TimeoutExpired):
        Fork(Answering(*({"returncode": None},) * 9), 7).wait(0)
