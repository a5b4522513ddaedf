# SPDX-License-Identifier: Apache-2.0
"""Two machines, as far as network and shared memory tell, for a server over several nodes (`--nnodes`).

Each has a network of its own, joined to the other's by a cable, and a /dev/shm of its own. Nothing of the machine's own
network is touched. Needs root, `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmark.servers import Server, ServerSpec, free_port
from benchmark.warm import ForkedServer, Nursery

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICES = ("node0", "node1")
TOOLS = ("unshare", "nsenter", "ip", "mount")
DEVICES_SEEN = ("mount", "-t", "sysfs", "sysfs", "/sys")
"""Libraries look for network devices there, and what was mounted elsewhere shows those of elsewhere."""

_BEGIN = (
    f"mount -t tmpfs tmpfs /dev/shm && {' '.join(DEVICES_SEEN)} && ip link set lo up && echo begun && "
    "exec sleep infinity"
)


def is_possible() -> bool:
    """Whether this program may make them."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in TOOLS):
        return False
    return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0


class _Served(ForkedServer):
    """One node's part of a server."""

    def __init__(self, nursery: Nursery, spec: ServerSpec, model: Path, log_dir: Path, *, port: int) -> None:
        self.nursery = nursery
        super().__init__(spec, model, log_dir, port=port)


class TwoNodes:
    """The calling thread moves to the first node for good, and with it what it starts from now on, its threads too.

    Raises:
        OSError: when it may not.
        RuntimeError: when the second node, or the cable, cannot be made.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET | CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        _run(("mount", "--make-rprivate", "/"))
        _run(DEVICES_SEEN)
        self._second = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _BEGIN], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._second.stdout is not None
        if self._second.stdout.readline() != b"begun\n":
            raise RuntimeError("the second node has not begun")
        cable = ("ip", "link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1])
        _run(("ip", "link", "set", "lo", "up"))
        _run((*cable, "netns", str(self._second.pid)))
        for node in range(2):
            _run((*self.inside(node), "ip", "addr", "add", f"{ADDRESSES[node]}/24", "dev", DEVICES[node]))
            _run((*self.inside(node), "ip", "link", "set", DEVICES[node], "up"))
        self._nurseries = [Nursery(inside=self.inside(node)) for node in range(2)]

    def inside(self, node: int) -> tuple[str, ...]:
        """What a command that runs on the node begins with."""
        if node == 0:
            return ()
        return ("nsenter", "--target", str(self._second.pid), "--net", "--mount", f"--wd={Path.cwd()}")

    def serve(self, specs: Sequence[ServerSpec], model: Path, log_dir: Path) -> list[Server]:
        """Begin one server over both nodes, of which each has its own flags; the first answers."""
        rendezvous, port = f"{ADDRESSES[0]}:{free_port()}", free_port()
        servers = []
        for node, spec in enumerate(specs):
            flags = ("--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", rendezvous)
            env = (("GLOO_SOCKET_IFNAME", DEVICES[node]), ("SGLANG_HOST_IP", ADDRESSES[node]))
            of_node = replace(
                spec,
                label=f"{spec.label}-{node}",
                args=(*spec.args, *flags),
                env=(*spec.env, *env),
            )
            servers.append(_Served(self._nurseries[node], of_node, model, log_dir, port=port))
        return servers

    def close(self) -> None:
        # Each ends with who may ask it.
        self._nurseries.clear()
        self._second.kill()
        self._second.wait()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
