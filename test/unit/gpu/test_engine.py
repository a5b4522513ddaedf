# SPDX-License-Identifier: Apache-2.0
"""How ``make gpu-check`` starts a server on a machine on which Banyan is not installed."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test.gpu import engine

from banyan import __version__

GROUP = "sglang.srt.plugins"


def test_plugin_paths_when_banyan_is_not_installed_then_sglang_finds_the_same_entry_point(tmp_path, monkeypatch):
    (installed,) = importlib.metadata.distribution("banyan").entry_points.select(group=GROUP)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    paths = engine.plugin_paths(tmp_path / "plugin")
    (found,) = importlib.metadata.distributions(path=[paths[-1]])
    (written,) = found.entry_points.select(group=GROUP)
    assert found.version == __version__
    assert (written.name, written.value) == (installed.name, installed.value)


def test_plugin_paths_when_banyan_is_installed_then_nothing_is_written(tmp_path):
    engine.plugin_paths(tmp_path / "plugin")
    assert not (tmp_path / "plugin").exists()


STUB = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
signal.signal(signal.SIGTERM, signal.SIG_IGN if "--stubborn" in sys.argv else signal.SIG_DFL)
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf])
class Up(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *rest):
        pass
print("pids", os.getpid(), child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", port), Up).serve_forever()
"""

CHECK = """
import sys, time
from pathlib import Path
import engine
engine.LAUNCH = (sys.argv[1],)
engine.PATIENCE_S = 1
engine.end_on_termination()
server = engine.Server("m", log=Path(sys.argv[2]), further=sys.argv[3:])
server.wait_until_up(30)
try:
    print("up", flush=True)
    time.sleep(60)
finally:
    server.stop()
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_check(folder, *further):
    """A check whose server is up; the process, and those of its server."""
    (folder / "stub.py").write_text(STUB)
    log = folder / "server.log"
    command = [sys.executable, "-c", CHECK, str(folder / "stub.py"), str(log), *further]
    environment = {**os.environ, "PYTHONPATH": str(Path(engine.__file__).parent)}
    check = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert check.stdout.readline().strip() == "up"
    pids = [int(pid) for pid in log.read_text().split("pids ")[1].splitlines()[0].split()]
    return check, pids


def wait_for_end(pids):
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize("further", [(), ("--stubborn",)], ids=["", "a server that ignores SIGTERM"])
def test_check_when_it_is_terminated_then_no_process_of_its_server_is_left(tmp_path, further):
    check, pids = start_check(tmp_path, *further)
    check.send_signal(signal.SIGTERM)
    assert check.wait(60) != 0
    assert wait_for_end(pids) == []


def test_check_when_it_is_killed_then_its_server_dies_with_it(tmp_path):
    check, (server, child) = start_check(tmp_path)
    check.kill()
    check.wait()
    assert wait_for_end([server]) == []
    os.kill(child, signal.SIGKILL)  # SGLang's own processes watch their parent; the stub's child does not.


def test_ports_when_asked_for_then_nobody_answers_there():
    assert engine.free_port() != engine.free_port()
