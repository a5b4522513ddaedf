# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of a server's main process under load, and a start at once on the same port, store and kept arena, over
and over: ``python -m benchmark.restarts --rounds 20``. Leaves build/restarts/report.json.

After each round nothing of the killed server may be left (processes, mappings of its memory, locks), and every answer
of the next one is that of the first.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.modes import asking, models
from benchmark.modes.run import ENV
from benchmark.processes import ProcessSession
from benchmark.provenance import provenance
from benchmark.servers import ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

GONE_WITHIN_S = 60.0
LOAD_S = 2.0
NUM_CLIENTS = 6
ENDED = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, json.JSONDecodeError)
"""What a client sees of a server that was killed: no answer, or a part of one."""

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "6000", "--context-length", "2048"),
    *("--sleep-on-idle", "--banyan-host-gb", "0.25", "--banyan-store-admit", "first"),
)


def run(rounds: int, folder: Path) -> dict[str, Any]:
    """Kill and start so often; what was seen of each round."""
    kept = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="banyan-restarts-"))
    flags = (*FLAGS, "--banyan-store", str(folder / "store"), "--banyan-keep-host-arena", str(kept))
    spec = ServerSpec("restarts", 2, "on", flags, (*cpu_env(dp=2), *ENV))
    port = free_port()
    asked = asking.prompts()
    expected: list[tuple[float, ...]] | None = None
    seen = []
    for number in range(rounds):
        server = ForkedServer(spec, models.ensure(models.LLAMA), folder, port=port)
        began_s = time.monotonic()
        with server:
            wait_ready([server])
            up_s = time.monotonic() - began_s
            ask = asking.tokens(server.url)
            answers = asking.in_turn(ask, 2, asked)
            said = [answer.said for answer in answers]
            expected = said if expected is None else expected
            session = ProcessSession(server.pid)
            _load(server.url, asked, partial(os.kill, server.pid, signal.SIGKILL))
            left_s = _gone_after_s(session)
        seen.append(
            {
                "round": number,
                "up_s": round(up_s, 1),
                "gone_after_s": left_s,
                "num_wrong": sum(one != other for one, other in zip(said, expected, strict=True)),
                "cached": asking.tokens_from(answers[: len(asked)]),
            }
        )
    shutil.rmtree(kept)
    return {"where": provenance(), "rounds": seen, "is_right": all(map(_is_right, seen))}


def _is_right(one: dict[str, Any]) -> bool:
    return one["gone_after_s"] is not None and one["num_wrong"] == 0


def _load(url: str, asked: Sequence[Sequence[int]], kill: Callable[[], None]) -> None:
    """Ask from several clients, kill in between."""
    drawn = random.Random(7)

    def client(number: int) -> None:
        ask = asking.tokens(url)
        until_s = time.monotonic() + 2 * LOAD_S
        while time.monotonic() < until_s:
            try:
                ask(asked[drawn.randrange(len(asked))], number % 2)
            except ENDED:
                return

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list_of = [clients.submit(client, number) for number in range(NUM_CLIENTS)]
        time.sleep(LOAD_S)
        kill()
        for one in list_of:
            one.result()


def _gone_after_s(session: ProcessSession) -> float | None:
    """How long it took until no process of the server was left, and none that has its memory open."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + GONE_WITHIN_S:
        if not session.pids():
            return round(time.monotonic() - began_s, 2)
        time.sleep(0.05)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.restarts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    folder = Path("build/restarts")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        report = run(parser.parse_args().rounds, Path(scratch))
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
