# SPDX-License-Identifier: Apache-2.0
"""Servers forked from one process that has SGLang imported, for tests and checks that start many of them.

Each of the five processes of a server imports for seconds before it does anything. Here all of them are forks of one
that has done so; from there on a server is `sglang.launch_server` with its flags and variables, as ever, but for what
only takes time (`CHANGES`). Measurements of other systems, and tests of how a server starts, start real ones.

The process reads requests from a socket and answers each with one line: start a server, or say how one ended. It ends
with the socket, however the other side came to its end, and no server outlives it. Variables that are read while
modules are imported are those of the first server, for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from benchmark.processes import ProcessSession
from benchmark.servers import Server

SERVER = "sglang.launch_server"
MODULES = (
    SERVER,
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)
READ_ON_IMPORT = ("SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
POLL_S = 0.05
PR_SET_PDEATHSIG = 1


class Fork:
    """A server, as far as who started it needs to know: what `subprocess.Popen` says of a child."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"ended": self.pid})["returncode"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(SERVER, timeout or 0.0)
            time.sleep(POLL_S)
        return code


class Nursery:
    """The process that servers are forked from; started by the first of them."""

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({}), inside: Sequence[str] = ()) -> None:
        """``variables``: what it imports with, besides those of this process and of the first server. ``inside``: the
        command that starts it somewhere else (benchmark.two_nodes)."""
        self._variables = dict(variables)
        self._inside = tuple(inside)
        self._socket: socket.socket | None = None
        self._fixed: dict[str, str | None] = {}

    def start(self, variables: Mapping[str, str], arguments: Sequence[str], log: Path) -> Fork:
        """A server with these ``arguments`` and, besides those of this process, these ``variables``.

        Raises:
            ValueError: for variables that the first server had otherwise and that are read only once.
        """
        fixed = {name: variables.get(name, os.environ.get(name)) for name in READ_ON_IMPORT}
        if self._socket is None:
            self._fixed = fixed
            self._socket = self._begin(variables)
        if fixed != self._fixed:
            raise ValueError(f"forked servers have {self._fixed}, this one is to have {fixed}")
        told = {"arguments": list(arguments), "variables": dict(variables), "log": str(log)}
        return Fork(self, int(self.ask(told)["pid"]))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        with self._socket.makefile("rb", buffering=0) as answers:
            line = answers.readline()
        if not line:
            raise RuntimeError("the process that servers are forked from has ended")
        return dict(json.loads(line))

    def _begin(self, variables: Mapping[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [*self._inside, sys.executable, "-W", "ignore", "-m", "benchmark.warm", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **self._variables,
                    **{name: variables[name] for name in READ_ON_IMPORT if name in variables},
                },
                pass_fds=(theirs.fileno(),),
            )
        return ours


NURSERY = Nursery()
"""One for each process that starts servers."""


class ForkedServer(Server):
    """A server that is up sooner."""

    nursery = NURSERY

    def _begin(self, model: Path) -> Fork:
        return self.nursery.start(dict(self.spec.env), self.spec.flags(model, self.port), self.log_path.resolve())


def main(fd: int) -> None:
    """Import, then fork on request until the other side closes."""
    # SGLang tells of every model that a CPU cannot run.
    logging.disable(logging.WARNING)
    for name in MODULES:
        importlib.import_module(name)
    logging.disable(logging.NOTSET)
    for change in CHANGES:
        change()
    # Collected objects would be written to, and their memory with them, in every fork.
    gc.collect()
    gc.freeze()
    # Who started it stops its servers first and then hangs up, also where all of them are signalled together.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    running: set[int] = set()
    with contextlib.suppress(ConnectionError):
        for line in connection.makefile("rb"):
            request = json.loads(line)
            if "ended" in request:
                code = _ended(request["ended"])
                answer = {"returncode": code}
                if code is not None:
                    running.discard(request["ended"])
            else:
                nursery, pid = os.getpid(), os.fork()
                if pid == 0:
                    connection.close()
                    _die_with(nursery)
                    _become_server(**request)
                running.add(pid)
                answer = {"pid": pid}
            connection.sendall(json.dumps(answer).encode() + b"\n")
    # Nobody is left to stop these.
    for pid in running:
        ProcessSession(pid).kill()
    # At once: what was imported may have threads that an ordinary end would wait for.
    os._exit(0)


def _ended(pid: int) -> int | None:
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid == pid else None


def _die_with(parent: int) -> None:
    """Whatever ends the process that this one was forked from ends this one too, which SGLang's own processes watch."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_server(*, arguments: Sequence[str], variables: Mapping[str, str], log: str) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.environ.update(variables)
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    _fork_children()
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


def _fork_children() -> None:
    """Have the processes that SGLang spawns be forks, in which plugins are to be loaded as in new ones."""
    from multiprocessing.context import ForkProcess, SpawnProcess

    from sglang.srt import plugins

    os.register_at_fork(after_in_child=lambda: setattr(plugins, "_plugins_loaded", False))
    SpawnProcess._Popen = staticmethod(ForkProcess._Popen)  # type: ignore[method-assign]


def _parse_once() -> None:
    """Each server that shares compares what its patches were written against, in files that take a second to parse."""
    from banyan import patches

    patches.parsed_file = functools.cache(patches.parsed_file)
    patches.changed(patches.load_queue())


def _walk_modules_once() -> None:
    """For each hook SGLang looks into all modules for copies of what is hooked, which with everything imported takes
    seconds of each process: here it looks once for all hooks."""
    from sglang.srt.plugins import hook_registry

    registry, propagate = hook_registry.HookRegistry, hook_registry._propagate_patch
    apply_hooks = registry.apply_hooks

    def apply_at_once() -> None:
        hooked: dict[int, tuple[Any, Any, Any]] = {}
        hook_registry._propagate_patch = lambda *patch: hooked.update({id(patch[0]): patch}) or 0
        try:
            apply_hooks()
        finally:
            hook_registry._propagate_patch = propagate
        for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
            for name, value in list(vars(module).items()):
                original, wrapped, source = hooked.get(id(value), (None, None, None))
                if original is not None and module is not source:
                    setattr(module, name, wrapped)

    registry.apply_hooks = apply_at_once


def _see_signals_soon() -> None:
    """SGLang looks every five seconds whether it has been told to end."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    end = TokenizerManager.sigterm_watchdog

    async def end_soon(manager: TokenizerManager) -> None:
        while not manager.gracefully_exit:
            await asyncio.sleep(POLL_S)
        await end(manager)

    TokenizerManager.sigterm_watchdog = end_soon


CHANGES = (_parse_once, _walk_modules_once, _see_signals_soon)
"""Made once, before the first server."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
