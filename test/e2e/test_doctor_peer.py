# SPDX-License-Identifier: Apache-2.0
"""``banyan doctor --peer`` between two networks of their own: a good path, a slow one, one that loses packets, and one
whose second port is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmark import two_nodes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not two_nodes.is_possible(), reason="networks of one's own take the right to make them"),
]

HERE, THERE = "10.78.0.1", "10.78.0.2"
PORT = 7400
NUM_TRIES = 3
PROCESSOR = min(os.sched_getaffinity(0))
PAGE_SERVER = f"""
import sys, time
from pathlib import Path
from banyan.core import Address
from banyan.features.nodes.page_server import PageServer
from banyan.owner import read_secret
from banyan.transport.sealed.secret import Keys
server = PageServer(Address("{THERE}", {PORT}), Keys.of(read_secret(Path(sys.argv[1]))), max_pages=1, num_layers=3)
print("up", flush=True)
time.sleep(3600)
"""


class Network:
    """A process that does nothing in a network of its own. All that runs there runs on one processor: packets of one
    stream that are sent from two may overtake each other."""

    def __init__(self) -> None:
        words = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "up\n"
        self.pid = self._process.pid

    def words(self, *command: str) -> list[str]:
        return ["taskset", "-c", str(PROCESSOR), "nsenter", "-t", str(self.pid), "-n", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.words(*command), check=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The network here, that of the page server, and the file with their secret."""
    secret = tmp_path_factory.mktemp("path") / "secret"
    secret.touch(0o600)
    secret.write_text("a secret that two nodes know, and nobody else")
    here, there = Network(), Network()
    server = None
    try:
        here.run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(there.pid))
        for network, device, address in ((here, "here", HERE), (there, "there", THERE)):
            network.run("ip", "addr", "add", f"{address}/24", "dev", device)
            network.run("ip", "link", "set", device, "up")
        words = there.words(sys.executable, "-c", PAGE_SERVER, str(secret))
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        yield here, there, secret
    finally:
        if server is not None:
            server.kill()
            server.wait()
        here.close()
        there.close()


def examined(nodes):
    """The rows, by what they are about."""
    here, _, secret = nodes
    doctor = ["-m", "banyan.cli", "doctor", "--json", "--peer", f"{THERE}:{PORT}", "--secret-file", str(secret)]
    # /sys shows the devices of the network that mounted it.
    sees_its_own = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh"]
    words = here.words(*sees_its_own, sys.executable, *doctor)
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    rows = {row["what"].split()[0]: row for row in json.loads(done.stdout)}
    assert done.returncode == (0 if all(row["is_ok"] for row in rows.values()) else 1), done.stderr
    return rows


def examined_until(nodes, is_seen):
    """The rows of the first try that shows it, else of the last: a busy machine may have held up what was sent."""
    for _ in range(NUM_TRIES):
        rows = examined(nodes)
        if is_seen(rows):
            break
    return rows


def shape(there, *queue):
    there.run("tc", "qdisc", "replace", "dev", "there", "root", *queue)


def test_path_when_it_is_well_then_it_says_what_it_carries(nodes):
    rows = examined_until(nodes, lambda rows: all(row["is_ok"] for row in rows.values()))
    assert rows["path"]["is_ok"] and rows["bytes"]["is_ok"], rows
    assert "64 MiB at" in rows["bytes"]["detail"]


def test_path_when_it_is_slow_then_what_its_card_could_carry_stands_beside(nodes):
    shape(nodes[1], *"tbf rate 800mbit burst 256k limit 4m".split())
    moved = examined_until(nodes, lambda rows: "could carry" in rows.get("bytes", {}).get("hint", ""))["bytes"]
    assert moved["is_ok"] and "could carry" in moved["hint"], moved


def test_path_when_it_loses_packets_then_that_is_named(nodes):
    shape(nodes[1], *"tbf rate 300mbit burst 32k limit 60k".split())
    moved = examined_until(nodes, lambda rows: "came before" in rows.get("bytes", {}).get("detail", ""))["bytes"]
    assert not moved["is_ok"], moved
    assert "packets came before" in moved["detail"] and "lost" in moved["advice"]


def test_path_when_it_is_cut_then_the_port_is_named(nodes):
    nodes[1].run("ip", "link", "set", "there", "down")
    try:
        row = examined(nodes)["path"]
        assert not row["is_ok"] and f"port {PORT}" in row["detail"] and "firewall" in row["advice"]
    finally:
        nodes[1].run("ip", "link", "set", "there", "up")
