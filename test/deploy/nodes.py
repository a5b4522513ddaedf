# SPDX-License-Identifier: Apache-2.0
"""A node's part of a cluster, small: volumes, a network for each pod, a container runtime, and probes.

Everything is made inside a network and a mount namespace of this program's own (``scripts/deploy_check.sh`` begins it
so), and goes with them. Needs root, `ip`, `mount` and `crun` or `runc`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from test.deploy import container, probes

BRIDGE, BRIDGE_ADDRESS = "banyan-check", "10.88.0.1"
SECCOMP = Path("/usr/share/containers/seccomp.json")
CGROUP = "/banyan-check"
BACK_OFF_S = 10.0


def runtime() -> str | None:
    """The program that runs containers."""
    return shutil.which("runc") or shutil.which("crun")


def seccomp() -> Any:
    """The profile of RuntimeDefault, or None where none is installed (Debian: golang-github-containers-common)."""
    return container.oci_seccomp(json.loads(SECCOMP.read_text())) if SECCOMP.exists() else None


def run(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def begin_network() -> None:
    """
    Raises:
        RuntimeError: when this is the machine's own network.
    """
    if [link["ifname"] for link in json.loads(run("ip", "-j", "link"))] != ["lo"]:
        raise RuntimeError("this network is not its own: run scripts/deploy_check.sh")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


class Cluster:
    """Its pods find each other by names in a file that all of them see as /etc/hosts, as they would by DNS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = folder / "hosts"
        self._names: dict[str, str] = {}
        self._num_addresses = 1
        begin_network()

    def new_address(self) -> str:
        """A pod that takes another's place has another one."""
        self._num_addresses += 1
        return f"10.88.0.{self._num_addresses}"

    def call(self, name: str, address: str) -> None:
        self._names[name] = address
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._names.items())]
        # The same file: it is mounted.
        self.hosts.write_text("\n".join(lines) + "\n")
        self.hosts.chmod(0o644)


class Pod:
    """One pod with one container, watched by its probes. ``end`` it, or let a probe restart its container.

    ``node``: the folder that is its node's root, for what ``hostPath`` names; ``dns``: what others call it.
    """

    def __init__(
        self, cluster: Cluster, name: str, spec: Mapping[str, Any], image: container.Image, node: Path, dns: str
    ) -> None:
        (self.container,) = spec["containers"]
        self.name = name
        self.spec = spec
        self.address = cluster.new_address()
        self.num_restarts = 0
        self.said: list[tuple[float, str]] = []
        """What became of it, by seconds since its start."""
        self._cluster = cluster
        self._image = image
        self._node = node
        self._folder = cluster.folder / f"{name}-{self.address.rpartition('.')[2]}"
        self.log_path = self._folder / "log"
        self._folder.mkdir(parents=True)
        self._pause = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._connect()
        self._volumes = {one["name"]: self._volume(one) for one in spec["volumes"]}
        self._began_s = time.monotonic()
        self._ends = threading.Event()
        cluster.call(dns, self.address)
        self._start()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self._port}"

    @property
    def is_ready(self) -> bool:
        return self.watched.is_ready and not self.watched.must_restart

    @property
    def is_started(self) -> bool:
        return self.watched.is_started

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """``kubectl exec``."""
        words = [*self._runtime(), "exec", self._id, *command]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def processes(self) -> list[int]:
        """As this machine knows them."""
        found: list[int] = json.loads(run(*self._runtime(), "ps", "--format", "json", self._id))
        return found

    def end(self, grace_s: float | None = None) -> float:
        """Delete the pod; how long its container took. One that outlives its grace is killed."""
        self._ends.set()
        took_s = self._stop(self.spec["terminationGracePeriodSeconds"] if grace_s is None else grace_s)
        self._pause.kill()
        self._pause.wait()
        for path in (*self._mounted, self._root):
            run("umount", path)
        return took_s

    def tell(self, line: str) -> None:
        self.said.append((time.monotonic() - self._began_s, line))

    def _start(self) -> None:
        self._id = f"{self._folder.name}-{self.num_restarts}"
        bundle = self._folder / f"bundle-{self.num_restarts}"
        bundle.mkdir()
        self._root = self._layer(bundle)
        place = container.Place(
            network=f"/proc/{self._pause.pid}/ns/net",
            cgroup=f"{CGROUP}/{self._id}",
            hostname=self.name,
            volumes=self._volumes,
            files={"/etc/hosts": str(self._cluster.hosts)},
        )
        image = container.Image(**{**vars(self._image), "root": str(self._root)})
        config = container.runtime_config(self.container, image, place, seccomp())
        (bundle / "config.json").write_text(json.dumps(config, indent=1))
        self._log = self.log_path.open("ab")
        self._process = subprocess.Popen(
            [*self._runtime(), "run", "--bundle", str(bundle), self._id],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.watched = probes.Watched({key: one for key, one in self.container.items() if key.endswith("Probe")})
        self._ends = threading.Event()
        (port,) = self.container["ports"]
        self._port = port["containerPort"]
        probes.watch(self.watched, self.address, self._port, self._ends, self.tell)
        threading.Thread(target=self._restart_when_told, args=(self._process, self._ends), daemon=True).start()

    def _restart_when_told(self, process: subprocess.Popen[bytes], ends: threading.Event) -> None:
        """A container that a probe has given up, or whose process has ended, is started again in its pod."""
        while not ends.wait(0.5):
            if self.watched.must_restart or process.poll() is not None:
                ends.set()
                why = self.watched.must_restart or f"it ended with {process.returncode}"
                took_s = self._stop(self.spec["terminationGracePeriodSeconds"])
                self.tell(f"restarted: {why}; its end took {took_s:.1f} s")
                run("umount", self._root)
                self.num_restarts += 1
                # As a kubelet does after a first time.
                time.sleep(BACK_OFF_S)
                self._start()

    def _stop(self, grace_s: float) -> float:
        began_s = time.monotonic()
        if self._process.poll() is None:
            subprocess.run([*self._runtime(), "kill", self._id, "TERM"], capture_output=True, check=False)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.tell("killed: its grace was over")
            subprocess.run([*self._runtime(), "kill", self._id, "KILL"], capture_output=True, check=False)
            self._process.wait(30)
        subprocess.run([*self._runtime(), "delete", "--force", self._id], capture_output=True, check=False)
        self._log.close()
        return time.monotonic() - began_s

    def _runtime(self) -> list[str]:
        return [str(runtime()), "--root", str(self._cluster.folder / "runtime")]

    def _layer(self, bundle: Path) -> Path:
        """The image, and a layer of the container's own on it."""
        root, upper, work = (bundle / name for name in ("root", "upper", "work"))
        for path in (root, upper, work):
            path.mkdir()
        run(
            "mount",
            "-t",
            "overlay",
            "-o",
            f"lowerdir={self._image.root},upperdir={upper},workdir={work}",
            "overlay",
            root,
        )
        return root

    def _connect(self) -> None:
        """Its network, and a cable to all others."""
        number = self.address.rpartition(".")[2]
        inside = ("nsenter", f"--net=/proc/{self._pause.pid}/ns/net")
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._pause.pid}/ns/net") == own:
            time.sleep(0.01)
        cable = ("ip", "link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0")
        run(*cable, "netns", str(self._pause.pid))
        run("ip", "link", "set", f"pod{number}", "master", BRIDGE, "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        run(*inside, "ip", "link", "set", "eth0", "up")

    @property
    def _mounted(self) -> list[Path]:
        return [Path(self._volumes[one["name"]]) for one in self.spec["volumes"] if _is_in_memory(one)]

    def _volume(self, volume: Mapping[str, Any]) -> str:
        """Its folder on this machine."""
        folder = self._folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            path = self._node / volume["hostPath"]["path"].lstrip("/")
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                raise FileNotFoundError(f"{path}: hostPath of type {volume['hostPath']['type']}")
            return str(path)
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        if _is_in_memory(volume):
            size = container.num_bytes(volume["emptyDir"]["sizeLimit"])
            run("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", folder)
        elif "emptyDir" not in volume:
            raise ValueError(f"volume {volume['name']}: of a kind that is not known here")
        return str(folder)


def _is_in_memory(volume: Mapping[str, Any]) -> bool:
    return volume.get("emptyDir", {}).get("medium") == "Memory"


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> float:
    """How long it took.

    Raises:
        TimeoutError: naming what did not become so.
    """
    began_s = time.monotonic()
    while not is_so():
        if time.monotonic() - began_s > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.2)
    return time.monotonic() - began_s


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
