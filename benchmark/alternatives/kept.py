# SPDX-License-Identifier: Apache-2.0
"""What a system holds beside its pools: bytes in DRAM as its servers tell, bytes on disk as they or the file system
tell."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.alternatives.start import Running
from benchmark.alternatives.systems import PAGE_TOKENS, Budget, System
from benchmark.engine import Engine
from benchmark.router_failover import metric

STILL_S = 2.0
"""A disk that has not changed for so long is taken to hold everything that will be written."""

BLOCK_BYTES = 512
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Kept:
    """Pages in DRAM beside the pools, every copy counted, and bytes on disk. `disk_bytes`: what the files occupy, or
    what Banyan's ranks have written since they were started: their files are allocated before they are filled."""

    dram_pages: int
    dram_bytes: int
    disk_bytes: int
    num_files: int

    def to_json(self) -> dict[str, int]:
        return dict(self.__dict__)


def kept_by(running: Running, budget: Budget) -> Kept:
    """What the system holds now."""
    ranks = {server.url: _banyan_ranks(server.url) for server in running.servers}
    dram_pages = sum(_dram_pages(url, of_server) for url, of_server in ranks.items())
    stores = [rank["store"] for of_server in ranks.values() for rank in of_server if "store" in rank]
    files = [path for path in running.system.disk.rglob("*") if path.is_file()] if running.system.disk else []
    return Kept(
        dram_pages=dram_pages,
        dram_bytes=dram_pages * PAGE_TOKENS * budget.token_bytes,
        disk_bytes=(
            sum(store["written_bytes"] for store in stores) if stores else sum(_occupied_bytes(path) for path in files)
        ),
        num_files=len(files),
    )


def written_by(running: Running) -> tuple[int, ...]:
    """What has reached the disk so far, as figures that stop changing when everything has. Banyan's files are allocated
    before they are filled, so its ranks are asked; HiCache writes a file for each page."""
    found = [kept_files(running.system)]
    for server in running.servers:
        for rank in _banyan_ranks(server.url):
            store = rank.get("store", {})
            found += [rank["archived_pages"], store.get("written_pages", 0), store.get("backlog_pages", 0)]
    return tuple(found)


def kept_files(system: System) -> int:
    """Files in the system's folder."""
    return sum(path.is_file() for path in system.disk.rglob("*")) if system.disk else 0


def _dram_pages(url: str, ranks: Sequence[Mapping[str, Any]]) -> int:
    if ranks:
        return sum(rank.get("num_arena_pages", 0) for rank in ranks)
    # HiCache tells what its host pools hold, stock SGLang has none.
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return round(metric(text, "sglang:hicache_host_used_tokens")) // PAGE_TOKENS


def _banyan_ranks(url: str) -> list[dict[str, Any]]:
    """What each rank tells of Banyan; nothing of a server without it."""
    states = Engine(url, timeout_s=TIMEOUT_S).server_info().get("internal_states", [])
    return [state["banyan"] for state in states if "banyan" in state]


def _occupied_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * BLOCK_BYTES
    except FileNotFoundError:
        return 0


def wait_until_still(
    figure: Callable[[], Any], *, timeout_s: float, still_s: float = STILL_S, poll_s: float = 0.25
) -> bool:
    """Wait until `figure` has given the same for `still_s`; False where it went on changing for `timeout_s`. Half of
    the looks that this time has room for must agree, too: a machine that stands still sees no change either."""
    deadline_s = time.monotonic() + timeout_s
    last, since_s, num_same = figure(), time.monotonic(), 0
    while time.monotonic() - since_s < still_s or num_same < still_s / poll_s / 2:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(poll_s)
        now = figure()
        num_same += 1
        if now != last:
            last, since_s, num_same = now, time.monotonic(), 0
    return True
