# SPDX-License-Identifier: Apache-2.0
"""What a server has of everything that could grow, at one moment: its processes as the kernel counts them, its ranks as
they say themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
OF_RANKS = (
    *("num_published_pages", "num_quarantined_pages", "num_reading_pages", "num_locked_tokens", "num_take_backs"),
    *("num_arena_pages", "num_arena_filling_frames", "num_free_pages", "num_pool_pages", "num_failures"),
    *("num_live_ranks", "num_ranks", "fetched_pages", "published_pages", "quarantined_pages", "read_pages"),
    *("num_arena_evicted_pages", "archived_pages", "fetches_failed", "fetches_refused", "read_failed_pages"),
)
OF_STORES = ("num_records", "evicted_pages", "backlog_pages", "checksum_failures", "write_failures", "quota_refusals")
LEFT_OVER = (
    *("num_quarantined_pages", "num_reading_pages", "num_locked_tokens", "num_take_backs"),
    "num_arena_filling_frames",
)
"""What must be zero when nobody asks anything any more."""


@dataclass(frozen=True)
class ProcessSample:
    """`anonymous_kb`: memory that is its own, without shared memory and mapped files."""

    name: str
    anonymous_kb: int
    resident_kb: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True)
class Sample:
    """`ranks`: figures of OF_RANKS, and of OF_STORES behind `store_`, by rank; empty where the ranks did not answer."""

    at_s: float
    num_requests: int
    processes: dict[str, ProcessSample]
    ranks: dict[str, dict[str, int]]
    failures: dict[str, int]
    store_bytes: int

    def told(self) -> dict[str, Any]:
        return asdict(self)


def processes(pids: Sequence[int]) -> dict[str, ProcessSample]:
    """By `name pid`; without those that end meanwhile."""
    found = {}
    for pid in pids:
        sample = _process(PROC / str(pid))
        if sample is not None:
            found[f"{sample.name} {pid}"] = sample
    return found


def ranks(info: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The figures of each rank in what /server_info says."""
    told = {}
    for state in info["internal_states"]:
        banyan = state["banyan"]
        store = banyan.get("store") or {}
        figures = {name: int(banyan[name]) for name in OF_RANKS}
        told[str(banyan["dp_rank"])] = figures | {f"store_{name}": int(store[name]) for name in OF_STORES if store}
    return told


def failures(info: Mapping[str, Any]) -> dict[str, int]:
    """Hooks that raised, of all ranks, and how often."""
    counts: dict[str, int] = {}
    for state in info["internal_states"]:
        for where, count in state["banyan"]["hook_failures"].items():
            counts[where] = counts.get(where, 0) + count
    return counts


def folder_bytes(folder: Path) -> int:
    """What the files of a folder occupy on the disk."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # Evicted meanwhile.
    return total


def _process(folder: Path) -> ProcessSample | None:
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        name = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
        num_fds = len(list((folder / "fd").iterdir()))
    except OSError:
        return None
    if "RssAnon" not in status:
        return None  # A zombie.
    return ProcessSample(
        # A fork has the name of what it was forked from.
        name=Path(name).name if "::" not in name else name,
        anonymous_kb=int(status["RssAnon"].split()[0]),
        resident_kb=int(status["VmRSS"].split()[0]),
        num_fds=num_fds,
        num_threads=int(status["Threads"]),
    )
