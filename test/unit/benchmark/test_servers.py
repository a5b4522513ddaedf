# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark import servers
from benchmark.demo import server_specs
from benchmark.processes import ProcessSession
from benchmark.servers import Server, ServerFailed, ServerSpec, cpu_env, free_port, wait_ready

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Servers run the script at this path instead of the real engine."""
    script = tmp_path / "engine.py"
    monkeypatch.setattr(
        ServerSpec, "command", lambda self, model, port: [sys.executable, str(script), str(port), self.label]
    )
    return script


def states(pids: list[int]) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def wait_until(what: object, *, timeout_s: float = 5.0) -> None:
    assert callable(what)
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.02)


def test_session_when_asleep_then_all_its_processes_stop_and_none_else() -> None:
    leader = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    session = ProcessSession(leader.pid)
    try:
        assert leader.stdout is not None and leader.stdout.readline() == b"up\n"
        pids = session.pids()
        assert len(pids) == 2 and leader.pid in pids
        session.asleep()
        wait_until(lambda: states(pids) == {"T"})
        session.awake()
        wait_until(lambda: "T" not in states(pids))
        assert session.memory_bytes() > 0
    finally:
        session.kill()
        leader.communicate()
    wait_until(lambda: session.pids() == [])


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_session_when_not_a_leader_then_refused(pid: int) -> None:
    with pytest.raises(ValueError, match="session leader"):
        ProcessSession(pid)


def test_server_when_it_ends_early_then_the_error_shows_its_log(fake_engine: Path, tmp_path: Path) -> None:
    fake_engine.write_text("import sys; print('no memory for', sys.argv[2]); sys.exit(3)")
    with Server(ServerSpec("odd", 2, "on"), tmp_path, tmp_path / "logs") as server:
        with pytest.raises(ServerFailed, match=r"(?s)odd ended with 3.*no memory for odd"):
            wait_ready([server], poll_s=0.05)


def test_server_when_it_answers_then_ready_and_stopped_at_the_end(fake_engine: Path, tmp_path: Path) -> None:
    fake_engine.write_text(
        "import http.server, sys\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if self.path == '/health_generate' else 404); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Answer).serve_forever()\n"
    )
    waited: list[list[str]] = []
    with Server(ServerSpec("fine", 2, "on"), tmp_path, tmp_path / "logs") as server:
        wait_ready([server], poll_s=0.05, waiting=lambda missing, elapsed_s: waited.append(missing))
        assert server.start_up_s is not None and server.is_ready()
        assert waited and waited[0] == ["fine"]
        session = ProcessSession(server.pid)
    assert session.pids() == []
    server.stop()


def test_server_when_it_ignores_term_and_sleeps_then_killed_after_the_grace(
    fake_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.write_text(f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{TREE}")
    monkeypatch.setattr(servers, "STOP_GRACE_S", 0.2)
    server = Server(ServerSpec("stubborn", 2, "on"), tmp_path, tmp_path / "logs")
    session = ProcessSession(server.pid)
    wait_until(lambda: len(session.pids()) == 2)
    with pytest.raises(ServerFailed, match="does not answer"):
        wait_ready([server], poll_s=0.01, timeout_s=0.05)
    server.asleep()
    server.stop()
    wait_until(lambda: session.pids() == [])


def test_server_when_its_stop_is_interrupted_then_none_of_its_processes_is_left(
    fake_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.write_text(f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{TREE}")
    server = Server(ServerSpec("stubborn", 2, "on"), tmp_path, tmp_path / "logs")
    wait_until(lambda: len(server.pids()) == 2)
    wait = server._process.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait()

    monkeypatch.setattr(server._process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    wait_until(lambda: server.pids() == [])


DRIVER = """
import sys, time
from pathlib import Path
from benchmark.servers import Server, ServerSpec, unwind_on_sigterm

unwind_on_sigterm()
folder = Path(sys.argv[1])
with Server(ServerSpec("one", 1, "stock"), folder, folder) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", ProcessSession]]:
    """A program with a server, in place of which a module of the same name sleeps."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/launch_server.py").write_text("import time; time.sleep(60)")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    # Whoever runs the tests may have told them to ignore it, as nohup(1) does.
    command = ["env", "--default-signal=HUP", sys.executable, "-c", DRIVER, str(tmp_path)]
    program = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    server = int(program.stdout.readline())
    session = ProcessSession(server)
    # Before that it has not said that it is to end with the program.
    wait_until(lambda: Path(f"/proc/{server}/cmdline").read_bytes().startswith(sys.executable.encode()))
    yield program, session
    session.kill()
    program.kill()
    program.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_program_when_it_is_told_to_end_or_its_terminal_is_closed_then_it_stops_its_server(driver, number) -> None:
    program, session = driver
    program.send_signal(number)
    assert program.wait(30) == 128 + number and session.pids() == []


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv of util-linux")
def test_program_when_it_is_killed_then_its_server_ends_too(driver) -> None:
    program, session = driver
    program.kill()
    wait_until(lambda: session.pids() == [])


def test_specs_when_made_then_equal_total_pools_and_the_right_flags() -> None:
    specs = server_specs(1000)
    commands = {label: spec.command(Path("model"), 1234) for label, spec in specs.items()}
    assert "--enable-banyan" not in commands["stock"]
    assert "--banyan-share" in commands["off"] and "--banyan-share" not in commands["on"]
    totals = {
        label: spec.dp * int(commands[label][commands[label].index("--max-total-tokens") + 1])
        for label, spec in specs.items()
    }
    assert set(totals.values()) == {2000}
    assert commands["on"][0] == "env" and "SGLANG_USE_CPU_ENGINE=1" in commands["on"]


def test_free_port_when_asked_again_before_it_is_bound_then_another_is_given():
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    assert all(0 < port < 65536 for port in ports)


def test_free_port_when_another_program_was_given_it_then_the_next_one(monkeypatch):
    first, second = free_port(), free_port()
    monkeypatch.setattr(servers, "_turns", iter([first, second]))
    servers._own.pop(first).close()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0banyan-port-{first}")
        assert free_port() == second


@pytest.mark.parametrize(
    ("shape", "cores", "num_threads"),
    [
        ({"dp": 1}, "0", "1"),
        ({"dp": 2}, "0|1", "1"),
        ({"dp": 1, "first_core": 1}, "1", "1"),
        ({"dp": 1, "cores_per_rank": 2}, "0-1", "2"),
        ({"dp": 2, "cores_per_rank": 2, "first_core": 4}, "4-5|6-7", "2"),
    ],
)
def test_cpu_env_when_ranks_share_a_machine_then_each_has_cores_of_its_own(shape, cores, num_threads) -> None:
    assert dict(cpu_env(**shape)) == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": num_threads,
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    }


def test_cpu_when_a_process_works_then_its_time_grows_under_its_title() -> None:
    code = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    session = ProcessSession(child.pid)
    try:
        deadline = time.monotonic() + 30
        while sum(session.cpu_s().values()) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ((name, used_s),) = session.cpu_s().items()
        assert used_s >= 0.2 and name.startswith(f"{child.pid} ")
    finally:
        session.kill()
        child.wait()


def test_first_error_when_others_follow_from_it_then_it_is_shown_too() -> None:
    lines = ["up", "Traceback (most recent call last):", "KeyError: 'the cause'", *["noise"] * 40, "killed"]
    assert servers.first_error(lines)[:3] == ["--- the first error:", *lines[1:3]]


def test_first_error_when_the_last_lines_have_it_then_it_is_not_said_twice() -> None:
    assert servers.first_error(["up", "Traceback (most recent call last):", "KeyError: 'the cause'"]) == []
    assert servers.first_error(["up"] * 100) == []


def test_command_when_the_server_has_a_core_then_all_its_processes_stay_there(tmp_path):
    command = ServerSpec("one", 1, "on", cores="1").command(tmp_path, 30000)
    assert command[command.index("taskset") :][:4] == ["taskset", "--cpu-list", "1", sys.executable]
    assert "taskset" not in ServerSpec("anywhere", 1, "on").command(tmp_path, 30000)
