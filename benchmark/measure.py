# SPDX-License-Identifier: Apache-2.0
"""One measurement: the same scripts, played once or several times in a row on one live server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmark.client import ChatClient, NativeClient, OpenAIClient, open_session
from benchmark.load import Arrivals, Progress, play
from benchmark.metrics import summarise
from benchmark.records import Record
from benchmark.workload.conversation import ChatTokenizer, Script
from benchmark.workload.scripts import order_of_run


@dataclass(frozen=True)
class Workload:
    """Everything that decides what a server is asked. `api` is native or openai; `description` goes into
    results."""

    scripts: tuple[Script, ...]
    tokenizer: ChatTokenizer
    arrivals: Arrivals
    seed: int
    num_runs: int = 2
    api: str = "native"
    timeout_s: float = 600.0
    description: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """Records and summary of one run (1, 2, ...) on the server called `label`."""

    label: str
    run: int
    repetition: int
    order: list[str]
    records: list[Record]
    summary: dict[str, Any]

    def to_lines(self) -> list[dict[str, Any]]:
        """JSON lines: every request, then the run."""
        head = {"label": self.label, "run": self.run, "repetition": self.repetition}
        lines = [{"kind": "request", **head, **record.to_json()} for record in self.records]
        return [*lines, {"kind": "run", **head, "order": self.order, **self.summary}]


async def measure(
    label: str,
    url: str,
    workload: Workload,
    *,
    repetition: int = 1,
    first_run: int = 1,
    progress: Callable[[int], Progress] | None = None,
    finished: Callable[[RunResult], None] | None = None,
) -> list[RunResult]:
    """Play the workload `num_runs` times on the server at `url`; each run but number 1 in another order. `first_run`:
    the number of the first one here, where the server has played others before.

    `finished` is called after each run, so that results reach the disk before the next one starts.
    """
    results = []
    for run in range(first_run, first_run + workload.num_runs):
        order = order_of_run(workload.scripts, seed=workload.seed, run=run)
        async with open_session(workload.timeout_s) as session:
            records, total_time_s = await play(
                workload.scripts,
                order,
                _client(workload.api, session, url),
                workload.tokenizer,
                workload.arrivals,
                progress=progress(run) if progress else None,
            )
        result = RunResult(
            label=label,
            run=run,
            repetition=repetition,
            order=[workload.scripts[index].id for index in order],
            records=records,
            summary=summarise(records, total_time_s=total_time_s),
        )
        results.append(result)
        if finished is not None:
            finished(result)
    return results


async def flush_cache(url: str, *, timeout_s: float = 60.0) -> None:
    """Empty every cache of the server at `url`; raises RuntimeError when it refuses."""
    async with open_session(timeout_s) as session:
        async with session.post(f"{url}/flush_cache", params={"timeout": "30"}) as response:
            if response.status != 200:
                raise RuntimeError(f"{url}/flush_cache: HTTP {response.status}: {(await response.text())[:200]}")


def _client(api: str, session: aiohttp.ClientSession, url: str) -> ChatClient:
    if api == "native":
        return NativeClient(session, url)
    if api == "openai":
        return OpenAIClient(session, url)
    raise ValueError(f"api must be native or openai, not {api!r}")
