# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' API server with etcd and, where it is there, the controllers, on this machine's loopback for one test."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "kubernetes"
"""Where ``scripts/kubernetes.sh`` leaves what it builds."""

TOKEN = "of-this-test"
START_S = 120.0


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{FOLDER}{os.pathsep}{os.environ['PATH']}")


def missing() -> list[str]:
    return [name for name in ("kube-apiserver", "etcd", "kubectl", "helm", "openssl") if program(name) is None]


class Kubectl:
    def __init__(self, config: Path) -> None:
        self._config = config

    def __call__(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(program("kubectl")), "--kubeconfig", str(self._config), *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)

    def well(self, *words: str, text: str | None = None) -> str:
        done = self(*words, text=text)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def cluster(folder: Path) -> Iterator[Kubectl]:
    """Without nodes: what becomes of a pod is seen as far as that it was made."""
    client, peer, port = _free_ports(3)
    running: list[subprocess.Popen[bytes]] = []
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (folder / "tokens").write_text(f"{TOKEN},admin,admin,system:masters\n")

    def start(name: str, *words: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen([str(program(name)), *words], stdout=log, stderr=log))

    try:
        start(
            "etcd",
            *("--data-dir", str(folder / "etcd"), "--listen-client-urls", f"http://127.0.0.1:{client}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--unsafe-no-fsync"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-cluster", f"default=http://127.0.0.1:{peer}"),
        )
        start(
            "kube-apiserver",
            *(f"--etcd-servers=http://127.0.0.1:{client}", f"--secure-port={port}", "--bind-address=127.0.0.1"),
            *("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"),
            *(f"--cert-dir={folder / 'certificates'}", f"--token-auth-file={folder / 'tokens'}"),
            *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24", "--watch-cache=false"),
            *("--service-account-issuer=https://banyan.test", f"--service-account-key-file={key}"),
            f"--service-account-signing-key-file={key}",
        )
        config = folder / "kubeconfig"
        config.write_text(json.dumps(_kubeconfig(port)))
        kubectl = Kubectl(config)
        _wait_until_well(kubectl, running, folder)
        if program("kube-controller-manager"):
            start(
                "kube-controller-manager",
                *(f"--kubeconfig={config}", f"--service-account-private-key-file={key}", "--leader-elect=false"),
                *("--bind-address=127.0.0.1", f"--secure-port={_free_ports(1)[0]}"),
                f"--cert-dir={folder / 'certificates-of-controllers'}",
                "--controllers=serviceaccount-controller,statefulset-controller,deployment-controller,"
                "replicaset-controller,namespace-controller",
            )
        yield kubectl
    finally:
        for process in reversed(running):
            # Nothing is to be kept, and etcd ends last.
            process.kill()
            process.wait()


def _kubeconfig(port: int) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }


def _wait_until_well(kubectl: Kubectl, running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    until_s = time.monotonic() + START_S
    while kubectl("get", "--raw", "/readyz").returncode:
        for process in running:
            assert process.poll() is None, f"{process.args[0]} has ended: {folder}"  # type: ignore[index]
        assert time.monotonic() < until_s, f"the API server does not get ready: {folder}"
        time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
