# SPDX-License-Identifier: Apache-2.0
"""Drawn bodies and headers against one server of two ranks, or a router in front of it: each is answered with a status,
the server lives, no rank and no hook has failed, no traceback ends in Banyan, and a known prompt keeps its tokens.

    make fuzz FUZZ_SECONDS=600
    make fuzz FUZZ_SECONDS=600 ARGS=--router

Each request is made by a number alone, so that a finding is repeated by ``--from NUMBER --requests 1``. Numbers that
found something are kept in test/e2e/drawn_requests.txt, which a test plays. Numbers below 0 are fields that the server
says it has, each with each of some odd values (benchmark.crossed_requests): ``--crossed`` plays all of these.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import banyan
from benchmark import drawn_requests
from benchmark.crossed_requests import crossed
from benchmark.modes import models
from benchmark.modes.asking import post
from benchmark.router_failover import router
from benchmark.servers import Server, unwind_on_sigterm, wait_ready
from benchmark.soak import rig
from benchmark.warm import ForkedServer

NUM_AT_ONCE = 8
BATCH = 200
TIMEOUT_S = 60.0
PROBE_TOKENS = 200
PACKAGE = f"{Path(banyan.__file__).parent}/"
TRACEBACK = "Traceback (most recent call last)"
FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)')
NUM_LISTED = 20


@dataclass
class Played:
    """Statuses of the requests, and what was wrong."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Fuzz:
    """One server, and what it said to the probe before anything was drawn. `url`: where the requests go, if not there;
    `log`: of what answers there."""

    def __init__(self, server: Server, url: str | None = None, log: Path | None = None) -> None:
        self._server = server
        self._port = urllib.parse.urlsplit(url or server.url).port
        self._logs = {server.log_path: 0} if log is None else {server.log_path: 0, log: 0}
        self._probe = models.random_prompt(random.Random(0), PROBE_TOKENS)
        with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=TIMEOUT_S) as response:
            self._crossed = crossed(json.load(response))
        self._expected = self._said(0)

    def play(self, numbers: Sequence[int]) -> Played:
        """The requests of these numbers, some at once; then a look at the server."""
        played = Played()
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            for number, status in zip(numbers, pool.map(self._status, numbers), strict=True):
                if isinstance(status, int):
                    played.statuses[status] += 1
                else:
                    played.wrong.append(f"request {number}: {status}")
        played.wrong += self._looked()
        return played

    @property
    def crossed_numbers(self) -> range:
        """Of fields that the server says it has."""
        return range(-len(self._crossed), 0)

    def _status(self, number: int) -> int | str:
        drawn = self._crossed[number] if number < 0 else drawn_requests.request(random.Random(number), self._probe)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", drawn.path, drawn.body, drawn.headers)
            answer = connection.getresponse()
            with contextlib.suppress(http.client.IncompleteRead):
                # SGLang breaks a stream off, behind its status, whose request turns out to be none.
                answer.read()
            return answer.status
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}: {drawn.path} {drawn.headers} {drawn.body[:500]!r}"
        finally:
            connection.close()

    def _looked(self) -> list[str]:
        """What is wrong with the server now."""
        if not self._server.is_running():
            return [f"the server has ended: {self._server.log_tail()}"]
        wrong = [
            f"rank {rank} says {said} to the probe" for rank in (0, 1) if (said := self._said(rank)) != self._expected
        ]
        for state in self._states():
            ours = state["banyan"]
            if ours["num_failures"] or ours["hook_failures"]:
                wrong.append(f"num_failures is {ours['num_failures']}: {ours['hook_failures']}")
        return wrong + self._own_tracebacks()

    def _states(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._server.url}/server_info", timeout=TIMEOUT_S) as response:
            return list(json.load(response)["internal_states"])

    def _own_tracebacks(self) -> list[str]:
        """Those of what the logs have more."""
        found = []
        for path, num_bytes in self._logs.items():
            with open(path, "rb") as log:
                log.seek(num_bytes)
                new = log.read()
            self._logs[path] += len(new)
            found += own_tracebacks(new.decode(errors="replace"))
        return found

    def _said(self, rank: int) -> list[int]:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": self._probe, "sampling_params": sampling, "routed_dp_rank": rank}
        return list(post(f"{self._server.url}/generate", body)["output_ids"])


def own_tracebacks(log: str) -> list[str]:
    """The last frames of tracebacks that end in Banyan: a fault of its own, whoever caught it."""
    found: Counter[str] = Counter()
    for text in log.split(TRACEBACK)[1:]:
        frames = [frame for line in text.splitlines() if (frame := FRAME.match(line))]
        if frames and frames[-1][1].startswith(PACKAGE):
            found[f"{frames[-1][1].removeprefix(PACKAGE)}:{frames[-1][2]} {frames[-1][3]}"] += 1
    return [f"{count} tracebacks end in {where}" for where, count in found.items()]


def batches(first: int, num_requests: int | None, seconds: float) -> Iterator[list[int]]:
    """Numbers from `first` on: so many, or for so long."""
    deadline_s = time.monotonic() + seconds
    number = first
    while time.monotonic() < deadline_s if num_requests is None else number < first + num_requests:
        size = BATCH if num_requests is None else min(BATCH, first + num_requests - number)
        yield list(range(number, number + size))
        number += size


def main() -> int:
    args = options().parse_args()
    unwind_on_sigterm()
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    with ExitStack() as stack:
        server = stack.enter_context(rig.sharing(args.out, args.cores, ForkedServer))
        wait_ready([server])
        fuzz = Fuzz(server)
        if args.router:
            log = args.out / "router.log"
            fuzz = Fuzz(server, stack.enter_context(router([server.url], "lmetric", log)), log)
        all_crossed = list(fuzz.crossed_numbers)
        parts = (
            [all_crossed[at : at + BATCH] for at in range(0, len(all_crossed), BATCH)]
            if args.crossed
            else batches(args.first, args.requests, args.seconds)
        )
        for numbers in parts:
            played = fuzz.play(numbers)
            statuses += played.statuses
            wrong += [f"{numbers[0]} to {numbers[-1]}: {line}" for line in played.wrong]
            if wrong:
                break
    print(f"{statuses.total()} requests from number {args.first} on: {dict(sorted(statuses.items()))}")
    print("\n".join(wrong[:NUM_LISTED]) or "nothing was wrong")
    return 1 if wrong else 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.http_fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--requests", type=int, help="so many, however long it takes")
    parser.add_argument(
        "--from", dest="first", type=int, default=time.time_ns() % 10**12, help="default: others each time"
    )
    parser.add_argument("--crossed", action="store_true", help="each field with each odd value, and nothing drawn")
    parser.add_argument("--router", action="store_true", help="send them to `banyan route` in front of the server")
    parser.add_argument("--cores", type=int, default=2, help="cores that the ranks share")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
