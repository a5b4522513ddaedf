# SPDX-License-Identifier: Apache-2.0
"""Drawn bodies and headers against one server of two ranks, or a router in front of it: each is answered with a status,
the server lives, no rank and no hook has failed, no traceback ends in Banyan, and a known prompt keeps its tokens.

    make fuzz FUZZ_SECONDS=600
    make fuzz FUZZ_SECONDS=600 ARGS=--router
    make fuzz FUZZ_SECONDS=600 ARGS=--tenants

Each request is made by a number alone, so that a finding is repeated by ``--from NUMBER --requests 1``. Every fourth
is about what caches are told, or memory that is given back (benchmark.told_requests). Numbers that found something are
kept in test/e2e/drawn_requests.txt, which a test plays. Numbers below 0 are fields that the server says it has, each
with each of some odd values (benchmark.crossed_requests): ``--crossed`` plays all of these. With ``--tenants`` the
router has keys, and nobody may be served without one of them.
"""

from __future__ import annotations

import argparse
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
from banyan.routing.cache_path import CACHE_PATH
from banyan.routing.headers import TENANT_HEADER
from benchmark import drawn_keys, drawn_requests, told_requests
from benchmark.crossed_requests import crossed
from benchmark.drawn_requests import Drawn
from benchmark.modes import models
from benchmark.router_failover import router
from benchmark.servers import Server, unwind_on_sigterm, wait_ready, write_secret
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
OF_TENANTS = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", CACHE_PATH)
"""Where prompts go."""


def drawn(number: int, prompt: Sequence[int]) -> Drawn:
    """The request of a number. Others than each fourth are what they were before there was anything to tell a cache."""
    kind = told_requests if number % 4 == 3 else drawn_requests
    return kind.request(random.Random(number), prompt)


@dataclass
class Played:
    """Statuses of the requests, and what was wrong."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Fuzz:
    """One server, and what it said to the probe before anything was drawn. `url`: where the requests go, if not there;
    `log`: of what answers there; `words`: what a router that knows tenants says to the server."""

    def __init__(
        self, server: Server, url: str | None = None, log: Path | None = None, words: tuple[str, ...] = ()
    ) -> None:
        self._server = server
        self._port = urllib.parse.urlsplit(url or server.url).port
        self._words = words
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
        request, port, is_known = self._crossed[number] if number < 0 else drawn(number, self._probe), self._port, True
        if self._words:
            rng = random.Random(f"keys of {number}")
            if rng.random() < 0.2:
                port = urllib.parse.urlsplit(self._server.url).port
                keyed = drawn_keys.forged(rng, request, self._words)
            else:
                keyed = drawn_keys.keyed(rng, request)
            request, is_known = keyed.drawn, keyed.is_known
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", request.path, request.body, request.headers)
            answer = connection.getresponse()
            try:
                said = answer.read()
            except http.client.IncompleteRead as broken:
                # SGLang breaks a stream off, behind its status, whose request turns out to be none.
                said = broken.partial
            # A stream begins before it is refused.
            is_served = answer.status < 400 and said and b'"error"' not in said
            if is_served and not is_known and request.path in OF_TENANTS:
                return f"served without a key: {request.path} {request.headers}"
            return answer.status
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}: {request.path} {request.headers} {request.body[:500]!r}"
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
        headers = {"Content-Type": "application/json", **({TENANT_HEADER: self._words[0]} if self._words else {})}
        asked = urllib.request.Request(f"{self._server.url}/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:
            return list(json.load(response)["output_ids"])


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
        fuzz = start(stack, args)
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


def start(stack: ExitStack, args: argparse.Namespace) -> Fuzz:
    """A server, and in front of it what was asked for."""
    secret = write_secret(args.out / "secret") if args.tenants else None
    flags = () if secret is None else ("--banyan-tenant-secret-file", str(secret))
    server = stack.enter_context(rig.sharing(args.out, args.cores, ForkedServer, (*rig.store(args.out), *flags)))
    wait_ready([server])
    log = args.out / "router.log"
    if secret is not None:
        tenants = drawn_keys.write_tenants(args.out / "tenants.toml")
        rules = ("--tenants-file", str(tenants), "--tenant-secret-file", str(secret))
        url = stack.enter_context(router([server.url], "lmetric", log, rules))
        return Fuzz(server, url, log, drawn_keys.words(secret))
    return Fuzz(server, stack.enter_context(router([server.url], "lmetric", log)), log) if args.router else Fuzz(server)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.http_fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--requests", type=int, help="so many, however long it takes")
    parser.add_argument(
        "--from", dest="first", type=int, default=time.time_ns() % 10**12, help="default: others each time"
    )
    parser.add_argument("--crossed", action="store_true", help="each field with each odd value, and nothing drawn")
    parser.add_argument("--router", action="store_true", help="send them to `banyan route` in front of the server")
    parser.add_argument("--tenants", action="store_true", help="the same, and the router knows tenants by their keys")
    parser.add_argument("--cores", type=int, default=2, help="cores that the ranks share")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
