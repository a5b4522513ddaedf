# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says about a machine's memory and processors, and about the container around it.

Everything is read from files of the kernel under ``root``; tests have a folder of their own there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from banyan import _native
from banyan.arena.sizing import FREE_SHARE
from banyan.cli.finding import Finding
from banyan.config import GIB

GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
NEVER_OVERCOMMIT = "2"


class Kernel:
    """Files of the kernel under ``root``; what is not there reads as nothing."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str) -> str:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def field(self, path: str, name: str) -> str:
        """The value of a ``name: value`` line."""
        found = re.search(rf"^{re.escape(name)}:\s*(.*)$", self.text(path), re.MULTILINE)
        return found[1] if found else ""

    def kib_as_bytes(self, name: str) -> int:
        """A size of ``/proc/meminfo``; 0 where it is not named."""
        return int((self.field("proc/meminfo", name).split() or ["0"])[0]) << 10

    def groups(self, controller: str) -> list[str]:
        """The folders of this process's control groups, of the older kind those of this controller. In a container a
        group's path may be that of the host, which is not there: the top is then the container's own."""
        found = []
        for line in self.text("proc/self/cgroup").splitlines():
            _number, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                top = f"sys/fs/cgroup/{controller if controllers else ''}".rstrip("/")
                found += [top, *(f"{top}/{part}" for part in _upwards(path.strip("/")))]
        return found

    def memory_limit(self, *names: str) -> int | None:
        """The tightest limit of these names over the control groups of this process; None for no limit."""
        limits = [self.text(f"{folder}/{name}") for folder in self.groups("memory") for name in names]
        return min((int(limit) for limit in limits if limit.isdigit()), default=None)

    def processor_quota(self) -> float | None:
        """The same of processors."""
        found = []
        for folder in self.groups("cpu"):
            # "quota period", in microseconds; "max" for no quota, or -1 in a group of the older kind.
            words = self.text(f"{folder}/cpu.max").split() or [
                self.text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")
            ]
            if all(word.isdigit() for word in words):
                found.append(int(words[0]) / int(words[1]))
        return min(found, default=None)


def _upwards(group: str) -> list[str]:
    parts = group.split("/") if group else []
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]


def examine_machine(kernel: Kernel) -> list[Finding]:
    """Every finding about memory, processors and the container."""
    checks: tuple[Callable[[Kernel], Finding], ...] = (
        memory,
        memory_limit,
        swap,
        overcommit,
        processors,
        numa_nodes,
        clock,
        container,
        pid_namespace,
        system_calls,
    )
    return [check(kernel) for check in checks]


def memory(kernel: Kernel) -> Finding:
    total_bytes, free_bytes = kernel.kib_as_bytes("MemTotal"), _native.available_bytes()
    if not total_bytes or free_bytes is None:
        return Finding("memory", False, "/proc/meminfo cannot be read", "mount /proc: ranks meet by way of it too")
    detail = (
        f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free; the host arena would take "
        f"{free_bytes / FREE_SHARE / GIB:.1f} GiB at most, unless --banyan-host-gb says otherwise"
    )
    return Finding("memory", True, detail)


def memory_limit(kernel: Kernel) -> Finding:
    limit_bytes = kernel.memory_limit("memory.max", "memory.limit_in_bytes")
    total_bytes = kernel.kib_as_bytes("MemTotal")
    if limit_bytes is None or (total_bytes and limit_bytes >= total_bytes):
        return Finding("memory of the control group", True, "no limit below the machine's")
    hint = "pools on the CPU and the host arena count against it: raise it by --banyan-host-gb, or lower that"
    return Finding("memory of the control group", True, f"at most {limit_bytes / GIB:.1f} GiB", hint=hint)


def swap(kernel: Kernel) -> Finding:
    total_bytes = kernel.kib_as_bytes("SwapTotal")
    if not total_bytes or kernel.memory_limit("memory.swap.max") == 0:
        return Finding("swap", True, "none for this process")
    hint = "an arena that is not pinned may be swapped out, and is then slower than computing: swapoff -a"
    return Finding("swap", True, f"{total_bytes / GIB:.1f} GiB", hint=hint)


def overcommit(kernel: Kernel) -> Finding:
    mode = kernel.text("proc/sys/vm/overcommit_memory")
    return Finding(
        "overcommit",
        mode != NEVER_OVERCOMMIT,
        f"vm.overcommit_memory is {mode or 'not told'}",
        "SGLang reserves far more memory than it uses and is refused it: sysctl vm.overcommit_memory=0",
    )


def processors(kernel: Kernel) -> Finding:
    num_online = len(re.findall(r"^processor\s*:", kernel.text("proc/cpuinfo"), re.MULTILINE))
    quota = kernel.processor_quota()
    num_usable = num_online if quota is None else min(num_online, quota)
    detail = f"{num_usable:g} of {num_online}" if num_usable != num_online else f"{num_online}"
    if num_usable >= 2:
        return Finding("processors", True, detail)
    hint = "each rank's copies run on a thread beside its forward: give the server two processors or more"
    return Finding("processors", True, detail, hint=hint)


def numa_nodes(kernel: Kernel) -> Finding:
    nodes = sorted((kernel.root / "sys/devices/system/node").glob("node[0-9]*"))
    reclaims = kernel.text("proc/sys/vm/zone_reclaim_mode") not in ("", "0")
    if reclaims:
        hint = "memory of the near node is reclaimed before the far one's is used: sysctl vm.zone_reclaim_mode=0"
    elif len(nodes) > 1:
        hint = "a rank's part of the arena lies on the node where its process ran first: set SGLANG_NUMA_BIND_V2=1"
    else:
        hint = ""
    return Finding("memory nodes", True, f"{max(1, len(nodes))}", hint=hint)


def clock(kernel: Kernel) -> Finding:
    source = kernel.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not source or source in GOOD_CLOCKS:
        return Finding("clock", True, source or "not told")
    return Finding("clock", True, source, hint="reading the time is a slow call here: boot with clocksource=tsc")


def container(kernel: Kernel) -> Finding:
    signs = [name for name in (".dockerenv", "run/.containerenv") if (kernel.root / name).exists()]
    groups = kernel.text("proc/1/cgroup")
    is_inside = bool(signs) or any(word in groups for word in ("docker", "kubepods", "containerd", "libpod"))
    if not is_inside:
        return Finding("container", True, "none seen")
    hint = "all ranks of a server belong into one container: docs/deployment.md says what it needs"
    return Finding("container", True, "inside one", hint=hint)


def pid_namespace(kernel: Kernel) -> Finding:
    numbers = kernel.field("proc/self/status", "NSpid").split()
    if len(numbers) <= 1:
        return Finding("PID namespace", True, "the machine's, or the outermost that can be seen")
    return Finding("PID namespace", True, "a container's", hint="all ranks of a node must be in the same one")


def system_calls(kernel: Kernel) -> Finding:
    filtered = kernel.field("proc/self/status", "Seccomp") == "2"
    if not filtered:
        return Finding("system calls", True, "not filtered")
    hint = "memfd_create, pidfd_open and the io_uring calls should be allowed: the findings on them say what is missing"
    return Finding("system calls", True, "filtered by seccomp", hint=hint)
