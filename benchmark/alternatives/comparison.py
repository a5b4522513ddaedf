# SPDX-License-Identifier: Apache-2.0
"""The order of a comparison: which system when, what is played on it, and what is written down of it."""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmark.alternatives import figures
from benchmark.alternatives.figures import Run
from benchmark.alternatives.play import ask_alone, fill, play_again, play_cold, warm_up
from benchmark.alternatives.start import Running, hicache_path, running
from benchmark.alternatives.systems import Budget, System, systems_of
from benchmark.alternatives.traces import NUM_OUTPUT_TOKENS, alone_prompts
from benchmark.compare import order_of_repetition
from benchmark.replay import Workload
from benchmark.results import append_lines
from benchmark.servers import Server

NUM_ALONE = 4
GOES_WRONG = (RuntimeError, OSError, LookupError, ValueError, TypeError, aiohttp.ClientError)
"""What becomes the row of one system, while the others are measured all the same: a server that does not come up, a
cache that is not cold, an answer that is not what it should be."""


@dataclass
class Comparison:
    """One comparison; results are on disk as soon as they are there."""

    workloads: dict[str, Workload]
    budgets: Sequence[Budget]
    names: Sequence[str]
    model: Path
    out: Path
    kind: type[Server] = Server
    runs: list[Run] = field(default_factory=list)
    alone: dict[tuple[str, int, int], dict[str, list[int]]] = field(default_factory=dict)
    not_run: list[dict[str, Any]] = field(default_factory=list)
    start_up_s: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, num_repetitions: int, max_s: float) -> None:
        """Every system on every workload; what does not come up is noted, and the others go on. After `max_s` none is
        started any more."""
        end_s = time.monotonic() + max_s
        for repetition in range(1, num_repetitions + 1):
            for budget in self.budgets:
                for name in order_of_repetition(self.names, repetition):
                    disk = self.out / "disk"
                    shutil.rmtree(disk, ignore_errors=True)
                    system = systems_of(budget, disk.absolute(), hicache_path(self.out / "plugin"))[name]
                    try:
                        if time.monotonic() > end_s:
                            raise RuntimeError(f"the {max_s / 60:.0f} minutes of --max-minutes were over")
                        self._measure_one(system, budget, repetition)
                    except GOES_WRONG as error:
                        self._note(system, budget, repetition, error)
                    shutil.rmtree(disk, ignore_errors=True)

    def _measure_one(self, system: System, budget: Budget, repetition: int) -> None:
        key = (system.name, budget.pool_tokens, repetition)
        if system.disk is not None:
            system.disk.mkdir(parents=True, mode=0o700)
        with self._running(system) as up:
            self.start_up_s.setdefault(system.name, []).append(round(up.start_up_s, 1))
            warm_up(up)
            for trace, workload in self.workloads.items():
                found = play_cold(up, workload, budget)
                self._save(Run(system.name, trace, "cold", budget.pool_tokens, repetition, *found))
            self.alone[key] = ask_alone(up, alone_prompts(NUM_ALONE), NUM_OUTPUT_TOKENS, times=2)
            if system.flush_empties_disk:
                # A restart is to find the workloads before the last one, too.
                fill(up, list(self.workloads.values())[:-1])
        if system.disk is None:
            return
        with self._running(system) as up:
            warm_up(up)
            for trace, workload in self.workloads.items():
                found = play_again(up, workload)
                self._save(Run(system.name, trace, "restart", budget.pool_tokens, repetition, *found))

    def _running(self, system: System) -> AbstractContextManager[Running]:
        say(f"starting {system.title}")
        return running(system, self.model, self.out / "logs", self.kind)

    def _save(self, run: Run) -> None:
        self.runs.append(run)
        append_lines(self.out / "results.jsonl", [{"kind": "run", **run.key, **run.figures, "tokens": run.tokens}])
        ttft = run.figures["ttft_s"]
        say(
            f"  {run.trace}, {run.phase}: cached {run.figures['cached_share']}, mean TTFT "
            f"{ttft['mean'] if ttft else float('nan'):.2f} s, {run.figures['total_time_s']:.0f} s, "
            f"{run.figures['num_errors']} failed"
        )

    def _note(self, system: System, budget: Budget, repetition: int, error: Exception) -> None:
        reason = last_error_line(f"{type(error).__name__}: {error}")
        say(f"  did not run: {reason}")
        self.not_run.append(
            {"system": system.name, "pool_tokens": budget.pool_tokens, "repetition": repetition, "reason": reason}
        )
        append_lines(
            self.out / "results.jsonl",
            [{"kind": "not_run", **self.not_run[-1], "log": "".join(traceback.format_exception(error))[-6000:]}],
        )

    def same_when_alone(self) -> dict[str, dict[str, int]]:
        """Per system: answers to requests that were alone on it, beside stock's."""
        found: dict[str, dict[str, int]] = {}
        for (name, pool_tokens, repetition), tokens in self.alone.items():
            reference = self.alone.get((figures.REFERENCE, pool_tokens, repetition))
            if reference is None:
                continue
            totals = found.setdefault(name, {"num_compared": 0, "num_identical": 0})
            for what, count in figures.same_tokens(tokens, reference).items():
                totals[what] += count
        return found


def last_error_line(text: str) -> str:
    """Of a message that ends with a log, the last line that names an error; without one its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines[1:] if "Error" in line.partition(":")[0] or "error:" in line.lower()]
    return (named[-1] if named else lines[0] if lines else "no reason given")[:400]


def say(line: str) -> None:
    """One line of progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
