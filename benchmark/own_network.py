# SPDX-License-Identifier: Apache-2.0
"""A network of one's own: a loopback that only this program and its children see, with a slow class of ports, or a
low class of marked packets.

Needs root, `unshare` and `tc`. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SLOW_PORTS = range(30720, 31744)
"""As many as one mask names, below those that connections begin from."""

DEVICE = "lo"
FAST_MBIT = 20_000
SLOW_CLASS, OTHER_CLASS = "1:20", "1:10"


def is_possible() -> bool:
    """Whether this program may make one."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("unshare", "tc", "ip"))


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


class TrafficClasses:
    """This network's loopback as a path of ``link_mbit`` with two classes: packets marked ``low_dscp`` get what all
    others leave. In packets of a wire's size, jumbo frames: two cores cannot fill a fast path with smaller ones.

    Raises:
        RuntimeError: as ``SlowPorts``.
    """

    def __init__(self, *, link_mbit: int, low_dscp: int) -> None:
        _begin()
        _run("ip", "link", "set", DEVICE, "mtu", "9000", "gso_max_segs", "1")
        _run("tc", "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "htb", "default", "10")
        add = ("tc", "class", "add", "dev", DEVICE, "parent")
        whole, most = ("rate", f"{link_mbit}mbit"), ("ceil", f"{link_mbit}mbit")
        _run(*add, "1:", "classid", "1:1", "htb", *whole, *most)
        high, low = (f"{link_mbit * percent / 100:g}mbit" for percent in (99, 1))
        _run(*add, "1:1", "classid", "1:10", "htb", "rate", high, *most, "prio", "0")
        _run(*add, "1:1", "classid", "1:20", "htb", "rate", low, *most, "prio", "1")
        marked = ("u32", "match", "ip", "tos", hex(low_dscp << 2), "0xfc", "flowid", "1:20")
        _run("tc", "filter", "add", "dev", DEVICE, "parent", "1:", "protocol", "ip", "prio", "1", *marked)


def _class(verb: str, name: str, mbit_per_s: float) -> tuple[str, ...]:
    # Segments of a loopback are up to 64 KiB: a smaller burst would cost rate.
    rate = ("rate", f"{mbit_per_s}mbit", "burst", "256k", "cburst", "256k", "quantum", "60000")
    return ("tc", "class", verb, "dev", DEVICE, "parent", "1:", "classid", name, "htb", *rate)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
