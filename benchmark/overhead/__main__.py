# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.overhead: what sharing costs where nothing is shared and steps take milliseconds.

Two servers of a tiny model with a long context, alike but for ``--banyan-share``, are asked in turns, the other one
asleep. The client runs on the same cores. Ends with 1 when a figure is beyond its bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.overhead import page, verdict
from benchmark.overhead.cases import CASES, LONGEST_TOKENS, PAGE_TOKENS, POOL_TOKENS, Case
from benchmark.overhead.play import Player, Round
from benchmark.processes import turn_of
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready

KINDS: tuple[Share, ...] = ("on", "off")
MOST_PREFILL_TOKENS = 4_096


def main() -> int:
    args = options().parse_args()
    unwind_on_sigterm()
    cases = [case for case in CASES if not args.case or any(wanted in case.name for wanted in args.case)]
    by_ranks = {ranks: measured(ranks, cases, args) for ranks in args.ranks}
    write_report(args.out / "report.json", {"by_ranks": by_ranks}, args)
    (args.out / "report.html").write_text(page.write_rows(by_ranks))
    above = [
        f"{ranks} x {row['case']}: {line}" for ranks, rows in by_ranks.items() for row in rows for line in row["above"]
    ]
    print("\n".join(above or ["every figure is within its bound"]), flush=True)
    return 1 if above else 0


def measured(ranks: int, cases: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of servers with so many ranks."""
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(server(kind, ranks, args.out)) for kind in KINDS}
        wait_ready(list(servers.values()))
        # Both are asked the same.
        players = {kind: Player(one, ranks, args.seed) for kind, one in servers.items()}
        for player in players.values():
            player.fill()
        for one in servers.values():
            one.asleep()
        rows = []
        for case in cases:
            rounds: dict[str, list[Round]] = {kind: [] for kind in KINDS}
            for number in range(-1, args.rounds):
                for kind in KINDS if number % 2 else KINDS[::-1]:
                    with turn_of(servers[kind]):
                        played = players[kind].play(case)
                    # The first of each is to warm up.
                    rounds[kind] += [played] if number >= 0 else []
            rows.append(verdict.compared(case, rounds["on"], rounds["off"]))
            say(ranks, rows[-1])
        return rows


def server(kind: Share, ranks: int, folder: Path) -> Server:
    flags = (
        *("--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE_TOKENS), "--sleep-on-idle"),
        *("--context-length", str(LONGEST_TOKENS + 16), "--max-total-tokens", str(POOL_TOKENS)),
        *("--chunked-prefill-size", str(MOST_PREFILL_TOKENS), "--max-running-requests", "320"),
    )
    cores = len(os.sched_getaffinity(0))
    env = (*cpu_env(dp=ranks, num_cores=cores), *ENV)
    return Server(ServerSpec(f"{kind}-{ranks}", ranks, kind, flags, env), models.ensure(models.LONG), folder)


def say(ranks: int, row: dict[str, Any]) -> None:
    step = (
        "" if row["step"] is None else f", step {row['step']['median']:.3f}, {row['scheduler_step_us']:.1f} us a step"
    )
    print(
        f"{ranks} x {row['case']}: "
        f"throughput {row['throughput']['median']:.3f}, TTFT {row['ttft']['median']:.3f}{step}, "
        f"scheduler {row['scheduler_us']:.0f} us, dispatcher {row['dispatcher_us']:.0f} us a request",
        flush=True,
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.overhead", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of the servers, one compute thread each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", nargs="*", help="only those with this in their name")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/overhead"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
