# SPDX-License-Identifier: Apache-2.0
"""A network of one's own: a loopback that only this program and its children see, with a slow class of ports; or a
path from there to another network, with a low class of marked packets.

Needs root, `unshare`, `nsenter` and `tc`. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SLOW_PORTS = range(30720, 31744)
"""As many as one mask names, below those that connections begin from."""

DEVICE = "lo"
FAST_MBIT = 20_000
SLOW_CLASS, OTHER_CLASS = "1:20", "1:10"
NEAR_DEVICE, FAR_DEVICE = "near", "far"
ENDS = ("10.77.0.1", "10.77.0.2")
SAVED_FRAMES = 4


def is_possible() -> bool:
    """Whether this program may make one."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("unshare", "nsenter", "tc", "ip"))


def run_inside(module: str, args: Sequence[str]) -> int:
    """Run ``python -m module args`` in a network of its own; its exit status."""
    return subprocess.run(["unshare", "--net", sys.executable, "-m", module, *args]).returncode


def figures_inside(module: str, args: Sequence[str], out: Path, name: str, otherwise: str) -> dict[str, Any]:
    """What ``python -m module --out out args`` writes there as ``name``, in a network of its own.

    Raises:
        RuntimeError: that says ``otherwise``, when it did not end well; what it has said stands before.
    """
    out.mkdir(parents=True, exist_ok=True)
    if run_inside(module, ["--out", str(out), *args]):
        raise RuntimeError(f"{otherwise}: see the lines above")
    found: dict[str, Any] = json.loads((out / name).read_text())
    return found


def _begin() -> None:
    """
    Raises:
        RuntimeError: when this is the machine's own network, which has other devices.
    """
    if [link["ifname"] for link in json.loads(_output("ip", "-j", "link"))] != [DEVICE]:
        raise RuntimeError("this network is not its own: run it by way of run_inside")
    _run("ip", "link", "set", DEVICE, "up")


class SlowPorts:
    """The class of ``SLOW_PORTS`` on this network's loopback. Made once, by the program that ``run_inside`` has run.

    Raises:
        RuntimeError: when this is the machine's own network, which has other devices.
    """

    def __init__(self) -> None:
        _begin()
        _run("tc", "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "htb", "default", "10")
        for name in (OTHER_CLASS, SLOW_CLASS):
            _run(*_class("add", name, FAST_MBIT))
        port, mask = hex(SLOW_PORTS.start), hex(0xFFFF & -len(SLOW_PORTS))
        for side in ("sport", "dport"):
            chosen = ("u32", "match", "ip", side, port, mask, "flowid", SLOW_CLASS)
            _run("tc", "filter", "add", "dev", DEVICE, "parent", "1:", "protocol", "ip", "prio", "1", *chosen)

    def limit(self, mbit_per_s: float) -> None:
        """Let all of them together have so much."""
        _run(*_class("change", SLOW_CLASS, mbit_per_s))

    def num_bytes(self) -> int:
        """What has passed, headers included."""
        # This tc has no JSON for its statistics.
        told = _output("tc", "-s", "class", "show", "dev", DEVICE)
        found = re.search(rf"class htb {SLOW_CLASS} .*?Sent (\d+) bytes", told, re.DOTALL)
        if found is None:
            raise RuntimeError(f"tc tells nothing of class {SLOW_CLASS}")
        return int(found[1])


@dataclass(frozen=True)
class Ends:
    """Addresses of the two ends of a path; the far one is in the network of the process ``far_pid``, or in this one."""

    near: str = "127.0.0.1"
    far: str = "127.0.0.1"
    far_pid: int | None = None

    def go_far(self) -> None:
        """Have this thread, from now on, in the network of the far end.

        Raises:
            OSError: when the system does not allow it.
        """
        if self.far_pid is None:
            return
        with open(f"/proc/{self.far_pid}/ns/net") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
                raise OSError(ctypes.get_errno(), "no way into the other network")


@contextmanager
def classed_path(*, link_mbit: int, low_dscp: int, frame_bytes: int) -> Iterator[Ends]:
    """A path of ``link_mbit`` each way, from this network to another one: a pair of devices, as a wire's two ends are.
    Each direction has two classes: packets marked ``low_dscp`` get what all others leave. They leave one by one, in
    frames of ``frame_bytes``.

    Raises:
        RuntimeError: when this is the machine's own network, which has other devices.
    """
    _begin()
    # It ends with this program, whatever becomes of that: its input does.
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as far:
        _wait_for_network_of(far.pid)
        _run("ip", "link", "add", NEAR_DEVICE, "type", "veth", "peer", "name", FAR_DEVICE, "netns", str(far.pid))
        for run, device, address in ((_run, NEAR_DEVICE, ENDS[0]), (_run_in(far.pid), FAR_DEVICE, ENDS[1])):
            _begin_end(run, device, address, frame_bytes)
            saved_bytes = SAVED_FRAMES * frame_bytes
            _add_classes(run, device, link_mbit=link_mbit, low_dscp=low_dscp, saved_bytes=saved_bytes)
        yield Ends(*ENDS, far.pid)


def _wait_for_network_of(pid: int) -> None:
    """Until the process has left ours."""
    deadline_s = time.monotonic() + 10
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if time.monotonic() > deadline_s:
            raise RuntimeError("unshare has made no network")
        time.sleep(0.01)


def _run_in(pid: int) -> Callable[..., None]:
    """Runs commands in the network of that process."""
    return partial(_run, "nsenter", f"--net=/proc/{pid}/ns/net")


def _begin_end(run: Callable[..., None], device: str, address: str, frame_bytes: int) -> None:
    run("ip", "address", "add", f"{address}/30", "dev", device)
    run("ip", "link", "set", device, "mtu", str(frame_bytes), "gso_max_segs", "1", "up")


def _add_classes(run: Callable[..., None], device: str, *, link_mbit: int, low_dscp: int, saved_bytes: int) -> None:
    """``saved_bytes``: what a timer that came late is made up for with."""
    run("tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "10")
    add = ("tc", "class", "add", "dev", device, "parent")
    most = ("ceil", f"{link_mbit}mbit", "burst", str(saved_bytes), "cburst", str(saved_bytes))
    run(*add, "1:", "classid", "1:1", "htb", "rate", f"{link_mbit}mbit", *most)
    high, low = (f"{link_mbit * percent / 100:g}mbit" for percent in (99, 1))
    run(*add, "1:1", "classid", "1:10", "htb", "rate", high, *most, "prio", "0")
    run(*add, "1:1", "classid", "1:20", "htb", "rate", low, *most, "prio", "1")
    marked = ("u32", "match", "ip", "tos", hex(low_dscp << 2), "0xfc", "flowid", "1:20")
    run("tc", "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1", *marked)


def _class(verb: str, name: str, mbit_per_s: float) -> tuple[str, ...]:
    # Segments of a loopback are up to 64 KiB: a smaller burst would cost rate.
    rate = ("rate", f"{mbit_per_s}mbit", "burst", "256k", "cburst", "256k", "quantum", "60000")
    return ("tc", "class", verb, "dev", DEVICE, "parent", "1:", "classid", name, "htb", *rate)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
