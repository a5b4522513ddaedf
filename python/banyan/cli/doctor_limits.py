# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says about the limits of a process, what it may open, and the ports that a server takes."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from banyan.cli.doctor_machine import Kernel
from banyan.cli.finding import Finding

SERVER_PORT, ROUTER_PORT = 30_000, 30_100
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 1 << 30
IO_URING_SETUP = 425
"""Number of the system call; the same on every architecture."""

Limits = Callable[[int], tuple[int, int]]


def examine_limits(kernel: Kernel) -> list[Finding]:
    """Every finding about this process."""
    getrlimit: Limits = resource.getrlimit
    return [
        locked_memory(getrlimit),
        open_files(getrlimit),
        file_size(getrlimit),
        address_space(getrlimit),
        processes(getrlimit),
        shm_folder(Path("/dev/shm")),
        foreign_files(_open_of_a_child),
        ptrace_scope(kernel),
        io_uring(kernel, _io_uring_errno),
        port("port of the server", SERVER_PORT),
        port("port of the router", ROUTER_PORT),
        port_range(kernel),
        compiler(host_obstacles),
    ]


def _limit(getrlimit: Limits, which: int) -> int | None:
    soft, _hard = getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def locked_memory(getrlimit: Limits) -> Finding:
    limit_bytes = _limit(getrlimit, resource.RLIMIT_MEMLOCK)
    if limit_bytes is None:
        return Finding("locked memory", True, "unlimited")
    hint = "GPU drivers pin without it, but the store registers its memory for I/O: ulimit -l unlimited"
    return Finding("locked memory", True, f"{limit_bytes >> 10} KiB", hint=hint)


def open_files(getrlimit: Limits) -> Finding:
    hint = f"connections and segments of a store take one each: ulimit -n {MIN_OPEN_FILES} or more"
    return _enough("open files", _limit(getrlimit, resource.RLIMIT_NOFILE), hint)


def processes(getrlimit: Limits) -> Finding:
    hint = f"each rank is a process with tens of threads: ulimit -u {MIN_OPEN_FILES} or more"
    return _enough("processes and threads", _limit(getrlimit, resource.RLIMIT_NPROC), hint)


def file_size(getrlimit: Limits) -> Finding:
    way_out = "it holds for shared memory too, so pools and arena cannot be made: ulimit -f unlimited"
    return _unlimited("file size", _limit(getrlimit, resource.RLIMIT_FSIZE), way_out)


def address_space(getrlimit: Limits) -> Finding:
    way_out = "every rank maps the pools of all others: ulimit -v unlimited"
    return _unlimited("address space", _limit(getrlimit, resource.RLIMIT_AS), way_out)


def _enough(name: str, limit: int | None, hint: str) -> Finding:
    """A limit that had better be above what a server opens; None is no limit."""
    if limit is None or limit >= MIN_OPEN_FILES:
        return Finding(name, True, "unlimited" if limit is None else f"up to {limit}")
    return Finding(name, True, f"up to {limit}", hint=hint)


def _unlimited(name: str, limit_bytes: int | None, way_out: str) -> Finding:
    """A limit that must not be there; None is no limit."""
    found = "unlimited" if limit_bytes is None else f"at most {limit_bytes} bytes"
    return Finding(name, limit_bytes is None, found, way_out)


def shm_folder(folder: Path) -> Finding:
    """Pools and arena are memfds and need no room there; SGLang's own channels and a kept arena do."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding("/dev/shm", False, str(error), "mount a tmpfs there: torch and NCCL want one")
    detail = f"{usage.free >> 20} of {usage.total >> 20} MiB free"
    if usage.total >= MIN_SHM_BYTES:
        return Finding("/dev/shm", True, detail)
    hint = "NCCL, torch and --banyan-keep-host-arena use it: docker run --shm-size=16g, in Kubernetes an emptyDir"
    return Finding("/dev/shm", True, detail, hint=hint)


def foreign_files(open_of_a_child: Callable[[], None]) -> Finding:
    """Whether a process may open another one's shared memory, as ranks do to meet."""
    try:
        open_of_a_child()
    except OSError as error:
        return Finding(
            "memory of another process",
            False,
            str(error),
            "ranks meet by way of /proc/<pid>/fd: run them as one user, with /proc mounted without hidepid and no "
            "security module that forbids it, or start with --banyan-share off",
        )
    return Finding("memory of another process", True, "can be opened by /proc/<pid>/fd")


def _open_of_a_child() -> None:
    """Raises OSError when the memory of a child cannot be opened or is not the child's."""
    script = "import os; fd = os.memfd_create('doctor'); os.write(fd, b'banyan'); print(fd, flush=True); os.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        number = child.stdout.readline().strip()
        if not number:
            raise OSError(errno.ENOSYS, "a child process could not make shared memory (memfd_create)")
        opened = os.open(f"/proc/{child.pid}/fd/{number}", os.O_RDWR)
        try:
            if os.pread(opened, 6, 0) != b"banyan":
                raise OSError(errno.EIO, "what the child has written is not there")
        finally:
            os.close(opened)
            with suppress(BrokenPipeError):
                child.communicate("\n")


def ptrace_scope(kernel: Kernel) -> Finding:
    """Yama restricts attaching, not reading: ranks meet under each of its modes. Debuggers do not."""
    scope = kernel.text("proc/sys/kernel/yama/ptrace_scope")
    if scope in ("", "0", "1"):
        return Finding("ptrace", True, f"scope {scope}" if scope else "not restricted by Yama")
    hint = "ranks meet all the same, but py-spy and gdb do not attach to a stuck one: sysctl kernel.yama.ptrace_scope=1"
    return Finding("ptrace", True, f"scope {scope}", hint=hint)


def io_uring(kernel: Kernel, setup: Callable[[], int]) -> Finding:
    """``setup`` tries to make a ring and says which error came of it; 0 for none."""
    number = setup()
    if number == 0:
        return Finding("io_uring", True, "allowed")
    disabled = kernel.text("proc/sys/kernel/io_uring_disabled")
    hint = "the store uses threads instead, which is slower: " + (
        "sysctl kernel.io_uring_disabled=0"
        if disabled in ("1", "2")
        else "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile"
    )
    return Finding("io_uring", True, f"refused ({os.strerror(number)})", hint=hint)


def _io_uring_errno() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(IO_URING_SETUP, 1, ctypes.create_string_buffer(256))
    if ring < 0:
        return ctypes.get_errno()
    os.close(ring)
    return 0


def port(what: str, number: int) -> Finding:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        # As servers do: a connection that was closed a moment ago is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            hint = "a server is there already, or start this one with another --port"
            return Finding(what, True, f"{number}: {error.strerror}", hint=hint)
        except OverflowError:
            return Finding(what, False, f"{number} is no port", "name one up to 65535 with --port")
    return Finding(what, True, f"{number} is free")


def port_range(kernel: Kernel) -> Finding:
    low, _, high = kernel.text("proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    detail = f"connections take {low} to {high}" if high else "not told"
    if not (low.isdigit() and high.isdigit()) or not int(low) <= SERVER_PORT <= int(high):
        return Finding("ports of connections", True, detail)
    hint = "a connection may sit on the server's port: sysctl net.ipv4.ip_local_port_range='32768 60999'"
    return Finding("ports of connections", True, detail, hint=hint)


def compiler(obstacles: Callable[[], list[str]]) -> Finding:
    missing = obstacles()
    return Finding(
        "page hash",
        not missing,
        f"not found: {', '.join(missing)}" if missing else "a C++ compiler and OpenSSL's headers are there",
        "SGLang compiles it at its first start: apt install g++ libssl-dev, or dnf install gcc-c++ openssl-devel",
    )


def host_obstacles() -> list[str]:
    """What SGLang needs to compile its page hash, on every machine, and does not find."""
    if shutil.which("c++") is None:
        return ["c++"]
    command = ["c++", "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input="#include <openssl/sha.h>\n", capture_output=True, text=True, check=False)
    return ["openssl/sha.h (libssl-dev)"] if done.returncode else []
