# SPDX-License-Identifier: Apache-2.0
"""What the chart renders."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "banyan"
VALUES = {
    "as they are": "",
    "without the router": "router.enabled=false",
    "without a store": "store.enabled=false",
    "a store that goes with its pod": "store.hostPath=",
    "three nodes, no locked memory": "lockMemory=false,nodes=3",
    "events": "events.enabled=true",
    "no policy": "networkPolicy.enabled=false",
    "a policy without the router": "router.enabled=false,networkPolicy.ingress[0].ports[0].port=30000",
    "servers that lend": "server.listen=0.0.0.0:7400,server.secretName=nodes",
    "a router of its own kind": "router.image=banyan:cpu,router.nodeSelector.kind=small,"
    "router.tolerations[0].operator=Exists",
    "a kept arena": "keptArena.hostPath=/dev/shm/banyan",
    "variables": "env[0].name=SGLANG_CPU_OMP_THREADS_BIND,env[0].value=0-3|4-7",
    "a registry with a key, a runtime of its own": "imagePullSecrets[0].name=key,imagePullPolicy=Always,"
    "runtimeClassName=nvidia,startupSeconds=3600",
    "servers without GPUs": r"image=banyan:cpu,resources.limits.nvidia\.com/gpu=null",
    "models of a claim": "modelVolume.persistentVolumeClaim.claimName=models",
}
BASELINE = (
    "modelVolume.persistentVolumeClaim.claimName=models,store.hostPath=,lockMemory=false,seccompProfile=RuntimeDefault"
)
"""What docs/deployment.md says of a namespace that enforces baseline."""


def rendered(values: str, *files: Path, release: str = "banyan") -> str:
    """With values as ``--set`` takes them, and files of values.

    Raises:
        RuntimeError: with what helm said.
    """
    helm = shutil.which("helm")
    assert helm, "no helm: `go install helm.sh/helm/v3/cmd/helm@v3.21.0`"
    words = [
        helm,
        "template",
        release,
        str(CHART),
        "--kube-version",
        "1.31",
        *(word for path in files for word in ("--values", str(path))),
    ]
    done = subprocess.run([*words, *(("--set", values) if values else ())], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def documents(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


def arguments(workload: dict[str, Any]) -> list[str]:
    """Of the one container of its pods."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    found: list[str] = container["args"]
    return found
