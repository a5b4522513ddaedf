# SPDX-License-Identifier: Apache-2.0
"""A node that is killed, or falls silent, while another one takes a prefix from it: right answers, and how late.

    python -m benchmark.remote --faults 20
    python -m benchmark.remote --faults 20 --nixl       needs root, `unshare` and `tc`

Between the two lies a path of bounded rate, on which a prompt is under way for about a second. The node that lends is
killed (SIGKILL, then started again) or stopped (SIGSTOP, then woken) when a part of a prompt's bytes has come, drawn
anew each time, until so many pulls of each kind have been cut short, or three times as many tries were made. Answers
are compared with those of the node that lends. The time beyond that of computing the prompt is what the fault costs the
one who asked. The server that borrows checks its pool whenever it is idle, and ends where a page is missing.

By NIXL its bytes go past the path of the page server's; there UCX's own ports are bounded, in a network of their own.

What was found is kept as it comes (`faults.jsonl`): the same command goes on with an interrupted run.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import slow_nixl
from benchmark.metrics import spread
from benchmark.modes.models import random_prompt
from benchmark.provenance import REPOSITORY, commit
from benchmark.remote_nodes import HOST, NUM_OUTPUT_TOKENS, Nodes
from benchmark.results import append_lines, read_lines
from benchmark.slow_path import SlowPath
from benchmark.warm import ForkedServer

PROMPT_TOKENS = 3000
FAULTS = ("kill", "stop")
CONTROL = "control"
MOST_TRIES = 3
"""For each pull that is to be cut."""

BY_WAY_OF = "127.0.0.2"
RATE = 12e6
"""Bytes a second. A prompt has 4 KiB a token, of two bytes each."""

CUT_AT = (0.02, 0.7)
"""Of a prompt's bytes. Less may be an answer of the page server; of the rest most is on its way to the one who asked,
who gets it in any case."""

Slow = SlowPath | slow_nixl.SlowNixl
NUM_CONTROLS = 5
MOST_EXTRA_S = {"kill": 1.0, "stop": 3.0}
"""Beyond the time to compute: an answer of the kernel at once, or 2 s of silence, and a second of room."""


class Rows:
    """What was found, in a file: an interrupted run is gone on with. Lines of another commit do not count."""

    def __init__(self, path: Path, commit: str | None) -> None:
        self._path = path
        self._commit = commit
        lines = read_lines(path) if path.exists() else []
        self._rows = [line["row"] for line in lines if line.get("commit") == commit]

    def add(self, row: dict[str, Any]) -> None:
        print(f"[faults] {row}", file=sys.stderr, flush=True)
        append_lines(self._path, [{"commit": self._commit, "row": row}])
        self._rows.append(row)

    def of(self, how: str) -> list[dict[str, Any]]:
        return [row for row in self._rows if row["how"] == how]

    def end(self) -> None:
        """Nothing is to be gone on with."""
        self._path.unlink(missing_ok=True)


def measure(model: Path, out: Path, num_faults: int, seed: int) -> dict[str, Any]:
    """One row for each fault, and what an undisturbed request takes."""
    nodes = Nodes(model, out, ForkedServer, ("--banyan-plan", "move"), BY_WAY_OF)
    path = SlowPath(BY_WAY_OF, HOST, (nodes.page_server_port, nodes.page_server_port + 1), rate=RATE)
    return _measure(nodes, path, out / "faults.jsonl", num_faults, seed)


def measure_nixl(model: Path, out: Path, num_faults: int, seed: int) -> dict[str, Any]:
    """The same by NIXL. Call it in a network of one's own (``own_network``)."""
    flags = ("--banyan-plan", "move", "--banyan-carrier", "nixl")
    nodes = Nodes(model, out, ForkedServer, flags, env=slow_nixl.ENV)
    found = _measure(nodes, slow_nixl.SlowNixl(rate=RATE), out / "nixl_faults.jsonl", num_faults, seed)
    if not found["nodes"]["num_by_nixl"]:
        raise RuntimeError("nothing came by NIXL")
    return found


def _measure(nodes: Nodes, path: Slow, kept: Path, num_faults: int, seed: int) -> dict[str, Any]:
    rows = Rows(kept, commit(REPOSITORY))
    rng = random.Random(f"faults-{seed}-{len(rows.of('kill'))}-{len(rows.of('stop'))}")
    with path, nodes:
        for _ in range(NUM_CONTROLS):
            rows.add(_control(nodes, path, rng))
        num_bytes = statistics.median(control["num_bytes"] for control in rows.of(CONTROL))
        # Stops first: they cost no start.
        for how in reversed(FAULTS):
            cut_pulls(nodes, path, how, num_faults, num_bytes, rng, rows)
        nodes.hear_lender()
        page_server, node = nodes.lender.ranks()[0]["page_server"], nodes.borrower.ranks()[0]["nodes"]
    rows.end()
    faults, controls = [row for how in FAULTS for row in rows.of(how)], rows.of(CONTROL)
    sizes = {"prompt_tokens": PROMPT_TOKENS, "mb_per_s": RATE / 1e6}
    found = {"sizes": sizes, "rows": faults, "controls": controls, "page_server": page_server, "nodes": node}
    return {**summarise(faults, controls), **found}


def _control(nodes: Nodes, path: Slow, rng: random.Random) -> dict[str, Any]:
    """A prompt from the other node, and computed, undisturbed."""
    ids = random_prompt(rng, PROMPT_TOKENS)
    nodes.lend(ids)
    before = path.num_bytes
    remote_s, _ = _timed(nodes, ids)
    num_bytes = path.num_bytes - before
    return {
        "how": CONTROL,
        "remote_s": remote_s,
        "compute_s": _timed(nodes, ids, f"control-{rng.random()}")[0],
        "num_bytes": num_bytes,
    }


def _timed(nodes: Nodes, ids: Sequence[int], salt: str | None = None) -> tuple[float, list[int]]:
    started_s = time.perf_counter()
    answer = nodes.borrower.generate(ids, num_tokens=NUM_OUTPUT_TOKENS, cache_salt=salt)
    return time.perf_counter() - started_s, answer["output_ids"]


def cut_pulls(
    nodes: Nodes,
    path: Slow,
    how: str,
    num_faults: int,
    prompt_bytes: float,
    rng: random.Random,
    rows: Rows,
) -> None:
    """One row for each fault, until ``num_faults`` of them have cut a pull short."""
    while sum(row["num_cut"] for row in rows.of(how)) < num_faults and len(rows.of(how)) < MOST_TRIES * num_faults:
        ids = random_prompt(rng, PROMPT_TOKENS)
        expected = nodes.lend(ids)
        before = nodes.borrower.ranks()[0]["nodes"]["num_lost_pulls"]
        cut_at = rng.uniform(*CUT_AT)
        fault = path.at(cut_at * prompt_bytes, nodes.kill_lender if how == "kill" else nodes.stop_lender)
        took_s, output = _timed(nodes, ids)
        came = fault.settle()
        after = nodes.borrower.ranks()[0]["nodes"]["num_lost_pulls"]
        rows.add(
            {
                "how": how,
                "cut_at": round(cut_at, 4),
                "took_s": round(took_s, 4),
                "num_cut": after - before,
                "is_identical": output == expected,
            }
        )
        if came:
            (nodes.start_lender_again if how == "kill" else nodes.wake_lender)()
            # Where no pull succeeds between those that are cut, NIXL is not asked any more.
            whole = random_prompt(rng, PROMPT_TOKENS)
            nodes.lend(whole)
            _timed(nodes, whole)


def summarise(rows: Sequence[dict[str, Any]], controls: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What the faults came to, by kind; those that found no pull to cut count as answers, and in no time."""
    compute_s = statistics.median(control["compute_s"] for control in controls)
    found: dict[str, Any] = {
        "outputs_identical": all(row["is_identical"] for row in rows),
        "compute_s": round(compute_s, 4),
        "remote_s": round(statistics.median(control["remote_s"] for control in controls), 4),
    }
    for how in FAULTS:
        mine = [row for row in rows if row["how"] == how]
        cut = [row["took_s"] - compute_s for row in mine if row["num_cut"]]
        found[how] = {
            "num_tries": len(mine),
            "num_cut": len(cut),
            "extra_s": spread(cut),
            "most_extra_s": MOST_EXTRA_S[how],
            "is_in_time": bool(cut) and max(cut) <= MOST_EXTRA_S[how],
        }
    return found
