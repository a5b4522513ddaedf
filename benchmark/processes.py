# SPDX-License-Identifier: Apache-2.0
"""A server's processes as one thing: all of a session, found by the id of the process that leads it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessSession:
    """The processes whose session is `leader_pid` (see setsid(2)). Nothing outside of it is ever
    signalled."""

    leader_pid: int

    def __post_init__(self) -> None:
        if self.leader_pid <= 1:
            raise ValueError(f"not the id of a session leader: {self.leader_pid}")

    def pids(self) -> list[int]:
        """Living processes of the session, in order of their ids."""
        return sorted(
            int(entry.name)
            for entry in PROC.iterdir()
            if entry.name.isdigit() and _session_of(entry / "stat") == self.leader_pid
        )

    def asleep(self) -> None:
        """Stop all processes, those too that one of them starts meanwhile."""
        stopped: set[int] = set()
        while waking := [pid for pid in self.pids() if pid not in stopped]:
            for pid in waking:
                send(pid, signal.SIGSTOP)
            stopped.update(waking)

    def awake(self) -> None:
        """Let all processes go on."""
        for pid in self.pids():
            send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End all processes at once."""
        for pid in self.pids():
            send(pid, signal.SIGKILL)

    def memory_bytes(self) -> int:
        """Memory of the session with shared pages counted once per share (PSS), in bytes."""
        return sum(_pss_bytes(PROC / str(pid) / "smaps_rollup") for pid in self.pids())

    def cpu_s(self) -> dict[str, float]:
        """Processor time that each process of the session has used so far, in seconds, by `pid title`."""
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        used = {}
        for pid in self.pids():
            ticks = _cpu_ticks(PROC / str(pid) / "stat")
            if ticks is not None:
                used[f"{pid} {_title(PROC / str(pid) / 'cmdline')}"] = ticks / ticks_per_s
        return used


class Sleeper(Protocol):
    """One server or several."""

    def asleep(self) -> None: ...

    def awake(self) -> None: ...


@contextlib.contextmanager
def turn_of(one: Sleeper) -> Iterator[None]:
    """Of those that sleep, only this one is awake: what the others have left to do takes no core from it."""
    one.awake()
    try:
        yield
    finally:
        one.asleep()


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process; one that has ended meanwhile is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _session_of(stat: Path) -> int | None:
    fields = _fields(stat)
    # state ppid pgrp session ...; a zombie only waits to be collected.
    return int(fields[3]) if fields and fields[0] != "Z" else None


def _cpu_ticks(stat: Path) -> int | None:
    fields = _fields(stat)
    # utime and stime of proc(5), counted from the state.
    return int(fields[11]) + int(fields[12]) if fields else None


def _fields(stat: Path) -> list[str]:
    """What follows the command's name in proc(5)'s stat; nothing for a process that has ended."""
    try:
        # The name may hold spaces and brackets: the fields begin after the last closing one.
        return stat.read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []


def _title(cmdline: Path) -> str:
    try:
        return cmdline.read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return "?"


def _pss_bytes(rollup: Path) -> int:
    try:
        for line in rollup.read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
