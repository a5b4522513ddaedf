# SPDX-License-Identifier: Apache-2.0
"""Real servers as child processes: start, wait until they answer, sleep, wake, stop.

Every server leads a session of its own, so that all its processes are found by one id and no other process is
ever touched. A server is `starting` until it answers, then `ready`; `stop` ends it from any state, twice is
fine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Protocol

from banyan.config import CPU_ISA_WITHOUT_AMX
from benchmark.processes import ProcessSession, send

Share = Literal["on", "index", "off", "engine", "stock"]
SHARE_FLAGS: dict[Share, tuple[str, ...]] = {
    "on": ("--enable-banyan",),
    "index": ("--enable-banyan", "--banyan-share", "index"),
    "off": ("--enable-banyan", "--banyan-share", "off"),
    "engine": ("--enable-banyan-cpu-engine",),
    "stock": (),
}
STOP_GRACE_S = 45.0
BESIDE_GRACE_S = 90.0
"""A router waits so long for requests that are under way."""

NUM_LOG_LINES = 30
FIRST_ERROR = "Traceback (most recent call last)"
NUM_ERROR_LINES = 60
PORTS = range(15000, 21600, 10)
"""SGLang counts more ports up from its own, up to 240, and has others from 22,000 to 29,999 by lot. What it has chosen,
it binds later: nobody else must find it free meanwhile."""
_turns = itertools.cycle(random.sample(PORTS, len(PORTS)))
_own: dict[int, socket.socket] = {}
"""By port, what keeps other programs of this machine from being given it, too, until this one ends."""


class Process(Protocol):
    """The leading process of a server, and of a session of its own."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class ServerFailed(RuntimeError):
    """The server ``label`` did not come up; the message ends with the last lines of its log."""

    def __init__(self, label: str, reason: str, log_tail: str) -> None:
        super().__init__(f"server {label} {reason}\n{log_tail}")
        self.label = label


def cpu_env(
    *, dp: int, cores_per_rank: int = 1, first_core: int = 0, num_cores: int | None = None
) -> tuple[tuple[str, str], ...]:
    """Variables of SGLang's CPU engine for `dp` ranks with `cores_per_rank` compute threads each. SGLang also wants a
    name of cores for each rank, counted from `first_core` and in turns of `num_cores`: nothing is pinned by it here."""
    starts = [first_core + rank * cores_per_rank for rank in range(dp)]
    if num_cores is not None:
        starts = [start % num_cores for start in starts]
    cores = [str(start) if cores_per_rank == 1 else f"{start}-{start + cores_per_rank - 1}" for start in starts]
    return (
        ("SGLANG_USE_CPU_ENGINE", "1"),
        ("SGLANG_CPU_OMP_THREADS_BIND", "|".join(cores)),
        # SGLang binds threads to the cores above only where it finds AMX and its own `sgl_kernel`: not here. Without
        # the line below every rank starts a thread per core, and the threads of two ranks wait for each other in
        # turns: three times slower on two cores.
        ("OMP_NUM_THREADS", str(cores_per_rank)),
        # With AMX the rows of a matrix product round differently with their number, so no cache could give the tokens
        # of a server without it: docs/design/0003. Changes nothing on processors without AMX.
        ("ONEDNN_MAX_CPU_ISA", CPU_ISA_WITHOUT_AMX),
    )


@dataclass(frozen=True)
class ServerSpec:
    """What to start. `share`: Banyan on, dispatching without fetching, Banyan with sharing off, stock with
    the CPU engine that Banyan's servers have, or plain stock; `env` is added to the inherited; `cores`: the only ones
    that its processes run on, as taskset(1) lists them; None for all that this program has."""

    label: str
    dp: int
    share: Share
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cores: str | None = None

    def command(self, model: Path, port: int) -> list[str]:
        """The full command line; variables are set by env(1), which leaves the inherited ones alone."""
        variables = [f"{name}={value}" for name, value in self.env]
        # Whoever starts it may be killed: then the server ends, and its processes, which watch it. Of who starts it the
        # kernel takes the thread: one that starts a server must not end before it.
        bound = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        confined = () if self.cores is None else ("taskset", "--cpu-list", self.cores)
        program = (sys.executable, "-m", "sglang.launch_server")
        return ["env", *variables, *bound, *confined, *program, *self.flags(model, port)]

    def flags(self, model: Path, port: int) -> list[str]:
        """What follows the program's name on the command line."""
        return [
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--dp", str(self.dp)),
            *SHARE_FLAGS[self.share],
            *self.args,
        ]


class Server:
    """One running server. Use it as a context manager, or call `stop`. `port`: None for any that is free."""

    def __init__(self, spec: ServerSpec, model: Path, log_dir: Path, *, port: int | None = None) -> None:
        self.spec = spec
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_dir / f"{spec.label}.log"
        self.start_up_s: float | None = None
        log_dir.mkdir(parents=True, exist_ok=True)
        self._start_s = time.monotonic()
        self._process = self._begin(model)
        self._session = ProcessSession(self._process.pid)

    def _begin(self, model: Path) -> Process:
        with open(self.log_path, "wb") as log:
            return subprocess.Popen(
                self.spec.command(model, self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the leading process, and of the session."""
        return self._process.pid

    def is_ready(self, *, timeout_s: float = 5.0) -> bool:
        """Whether it generates. Raises ServerFailed when it has ended."""
        if self._process.poll() is not None:
            raise ServerFailed(self.spec.label, f"ended with {self._process.returncode}", self.log_tail())
        if self._generates(timeout_s):
            if self.start_up_s is None:
                self.start_up_s = time.monotonic() - self._start_s
            return True
        return False

    def _generates(self, timeout_s: float) -> bool:
        return answers(f"{self.url}/health_generate", timeout_s=timeout_s)

    def is_running(self) -> bool:
        """Whether its leading process has not ended."""
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """Its living processes."""
        return self._session.pids()

    def memory_bytes(self) -> int:
        """Memory of all its processes, shared pages counted once."""
        return self._session.memory_bytes()

    def cpu_s(self) -> dict[str, float]:
        """Processor time of each of its processes so far, in seconds."""
        return self._session.cpu_s()

    def asleep(self) -> None:
        self._session.asleep()

    def awake(self) -> None:
        self._session.awake()

    def stop(self) -> None:
        """End it: politely, then after STOP_GRACE_S for all its processes by force; at once by force where this wait is
        interrupted."""
        try:
            if self._process.poll() is None:
                self.awake()
                send(self._process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_GRACE_S)
        finally:
            # Children that outlived their parent are still of the session.
            self.kill()

    def kill(self) -> None:
        """End all its processes by force, as a crash would."""
        self._session.kill()
        self._process.wait()

    def log_tail(self) -> str:
        """The first error in its log, which later ones often follow from, and the last lines."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join([*first_error(lines), f"--- last lines of {self.log_path}:", *lines[-NUM_LOG_LINES:]])

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def first_error(lines: Sequence[str]) -> list[str]:
    """The first traceback in a log, under a title; nothing where the last lines have it, or where there is none."""
    start = next((number for number, line in enumerate(lines) if FIRST_ERROR in line), len(lines))
    if start >= len(lines) - NUM_LOG_LINES:
        return []
    return ["--- the first error:", *lines[start : start + NUM_ERROR_LINES]]


def wait_ready(
    servers: Sequence[Server],
    *,
    timeout_s: float = 420.0,
    poll_s: float = 0.2,
    waiting: Callable[[list[str], float], None] | None = None,
) -> None:
    """Return when all `servers` generate; `waiting` is told who is missing and for how long it has been.

    Raises ServerFailed, with the end of the log, for one that ended or took longer than `timeout_s`.
    """
    start_s = time.monotonic()
    missing = list(servers)
    while True:
        missing = [server for server in missing if not server.is_ready()]
        if not missing:
            return
        elapsed_s = time.monotonic() - start_s
        if waiting is not None:
            waiting([server.spec.label for server in missing], elapsed_s)
        if elapsed_s > timeout_s:
            late = missing[0]
            raise ServerFailed(late.spec.label, f"does not answer after {elapsed_s:.0f} s", late.log_tail())
        time.sleep(poll_s)


def unwind_on_sigterm() -> None:
    """Make SIGTERM, and a terminal that is closed, an exception of the main thread, so that servers are stopped on the
    way out."""
    signal.signal(signal.SIGTERM, _exit_by_signal)
    # Under nohup(1) it goes on.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _exit_by_signal)


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def beside(command: Sequence[str], log: Path, url: str, *, timeout_s: float = 120.0) -> Iterator[None]:
    """A process that stands beside the servers, once a GET of `url` gives 200; ended on the way out, by force after
    BESIDE_GRACE_S.

    Raises RuntimeError when it does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        failure = f"{Path(command[0]).name} {' '.join(command[1:4])} did not come up: see {log}"
        wait_answers(url, lambda: process.poll() is None, failure, timeout_s=timeout_s)
        yield
    finally:
        process.terminate()
        try:
            process.wait(BESIDE_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_answers(url: str, is_running: Callable[[], bool], failure: str, *, timeout_s: float) -> None:
    """Return when a GET of `url` gives 200.

    Raises RuntimeError, with `failure`, when who should answer has ended or takes longer than `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not answers(url, timeout_s=2.0):
        if not is_running() or time.monotonic() > deadline_s:
            raise RuntimeError(failure)
        time.sleep(0.2)


def answers(url: str, *, timeout_s: float) -> bool:
    """Whether a GET of `url` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def write_secret(path: Path) -> Path:
    """A new secret for the page servers of some servers, where nobody else may read it; its absolute path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path.resolve()


def _claim(port: int) -> None:
    """Raises OSError where another program has it."""
    if port not in _own:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0banyan-port-{port}")
        except OSError:
            claim.close()
            raise
        _own[port] = claim


def free_port() -> int:
    """A port that nobody listens on now, below those that SGLang has by lot and the system gives to connections. This
    program gets none twice before all others had their turn, and none that another one has got by this function: what
    it got, it binds seconds later."""
    for port in itertools.islice(_turns, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _claim(port)
            return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop}")
