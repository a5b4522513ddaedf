# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.soak: ends with 1 when anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm, wait_ready
from benchmark.soak import page, rig, verdict
from benchmark.soak.run import Soak


def main() -> int:
    args = options().parse_args()
    unwind_on_sigterm()
    shutil.rmtree(args.out, ignore_errors=True)
    known = rig.learn(args.out, args.cores, args.seed, say)
    more = () if args.without_store else rig.store(args.out)
    with rig.sharing(args.out, args.cores, more=more) as server:
        wait_ready([server])
        soak = Soak(server, args.out, known, args.seed, say)
        asyncio.run(soak.run(args.minutes, args.clients))
    soak.left_over += [f"process {pid} outlived its server" for pid in server.pids()]
    wrong = verdict.failures(soak.tally, soak.samples, soak.left_over)
    found = {"wrong": wrong, **soak.tally.told(), "samples": [sample.told() for sample in soak.samples]}
    write_report(args.out / "report.json", found, args)
    page.write(args.out / "report.html", soak.tally, soak.samples, wrong)
    for line in wrong or ["nothing was wrong"]:
        say(line)
    say(f"{soak.tally.num_requests} requests, {soak.tally.num_compared} compared; {args.out / 'report.html'}")
    return 1 if wrong else 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmark.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12, help="how many ask at once")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="default: another each time")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores that the ranks share")
    parser.add_argument("--without-store", action="store_true", help="the arena is the last tier, and written back to")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    return parser


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
