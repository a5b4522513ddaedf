# SPDX-License-Identifier: Apache-2.0
"""What a figure must carry to be worth anything: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "torch", "transformers", "banyan")
REPOSITORY = Path(__file__).resolve().parents[1]
DIRTY = "-dirty"
"""Behind a commit: files of the checkout differed from it, or there was a module more."""

MOVED = "-moved"
"""Behind a commit: the checkout was another one when the figures were written down."""


def provenance() -> dict[str, Any]:
    """Hardware, versions, date, and the commit at which this program began, as one dictionary for a result file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit_of_run(AT_START, commit(REPOSITORY)),
        "load": {"at_start": LOAD_AT_START, "at_end": load()},
    }


def load() -> dict[str, Any]:
    """How busy the machine is: processes that ran or waited to, over the last 1 and 15 minutes, and the processor time
    that its host has taken from it since its start, in seconds."""
    last_minute, _, last_quarter = os.getloadavg()
    return {
        "over_1m": round(last_minute, 2),
        "over_15m": round(last_quarter, 2),
        "stolen_s": _stolen_s(Path("/proc/stat")),
    }


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory in bytes, and GPUs where there are any."""
    return {
        "cpu_model": _cpu_model(Path("/proc/cpuinfo")),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(Path("/proc/driver/nvidia/gpus")),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def place_and_time(where: Mapping[str, Any]) -> str:
    """Commit, day and hardware of a kept run, in words."""
    hardware = where["hardware"]
    return (
        f"{commit_in_words(where['commit'])}, {where['date'][:10]}, {hardware['cpu_model']} with "
        f"{hardware['num_cores']} cores"
    )


def commit_in_words(kept: str | None) -> str:
    """A commit of `provenance`, short enough for a sentence; that the checkout was dirty or moved is never cut off."""
    if kept is None:
        return "commit unknown"
    digest, mark, marks = kept.partition("-")
    return f"commit {digest[:10]}{mark}{marks}"


def commit_of_run(at_start: str | None, now: str | None) -> str | None:
    """The commit whose code ran: that of the start, with MOVED where the checkout has changed since."""
    return at_start if at_start is None or at_start == now else f"{at_start}{MOVED}"


def commit(folder: Path) -> str | None:
    """Commit of the checkout, with DIRTY when its code differs from it; None outside of a checkout."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        # A new module may have run as well; what else lies about did not.
        dirty = changed or _git(folder, "ls-files", "--others", "--exclude-standard", "*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}{DIRTY}" if dirty else head


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.strip()


def _cpu_model(path: Path) -> str:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Processor", "Hardware"):
                return value.strip()
    except OSError:
        pass
    return platform.machine()


def _stolen_s(path: Path) -> float | None:
    """The eighth figure of the first line (proc_stat(5))."""
    try:
        fields = path.read_text().split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def _gpus(folder: Path) -> list[str]:
    try:
        files = sorted(folder.glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model")]
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines]


AT_START = commit(REPOSITORY)
"""The commit when this module was imported, and with it the benchmark. A run may take hours, and somebody may commit
meanwhile: what the checkout has at the end is not what ran."""
LOAD_AT_START = load()
