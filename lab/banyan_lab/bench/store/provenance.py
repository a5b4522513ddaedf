# SPDX-License-Identifier: Apache-2.0
"""Where figures come from: machine, kernel, file system, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from banyan.cli.doctor import shared_memory_huge_pages

PACKAGES = ("sglang", "lmdb", "rocksdict", "nixl", "numpy")


def describe(path: str) -> dict[str, Any]:
    return {
        "command": "banyan bench store --path DIR --json",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "kernel": platform.release(),
        "file_system": _file_system(path),
        "shared_memory_huge_pages": shared_memory_huge_pages(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _cpu() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return None


def _file_system(path: str) -> str | None:
    """Type of the mount that holds ``path``: the one with the longest mount point above it."""
    real = os.path.realpath(path)
    best: tuple[str, str | None] = ("", None)
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
