# SPDX-License-Identifier: Apache-2.0
"""A recorded workload against a running server, from cold caches.

    python -m benchmark.trace_replay --trace FILE --window-seconds 600 --sample-ratio 0.02 describe
    python -m benchmark.trace_replay --trace FILE ... play --url http://127.0.0.1:30000 --result build/replay.jsonl

`describe` sends nothing: it says what the sample is and how much of the sharing survived it. `play` empties the
server's caches and plays the trace; several `--policy` are played one after the other, in an order that rotates with
the repetition (the server must run with Banyan, which takes the policy from each request).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

if not __package__:
    # Run as a file: Python then looks for modules beside it, not where `benchmark` itself is found.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.engine import policy_hints
from benchmark.provenance import provenance
from benchmark.records import Record
from benchmark.replay import WarmStart, Workload, play_cold, summary
from benchmark.replay_options import add_workload_options, workload_of
from benchmark.results import append_lines

LOOK_PERIOD_S = 0.25

AS_SERVED = "as_served"
"""The label of a run that names no policy: whatever the server does."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trace_replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_workload_options(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    describe = commands.add_parser("describe", help="say what would be played")
    describe.set_defaults(run=_describe)
    play = commands.add_parser("play", help="play it on a running server")
    play.add_argument("--url", default="http://127.0.0.1:30000")
    play.add_argument("--label", default="server", help="name of the server in results")
    play.add_argument(
        "--policy", action="append", default=[], help="dispatch policy to ask for; give several to compare"
    )
    play.add_argument("--repetitions", type=int, default=1)
    play.add_argument(
        "--first-repetition", type=int, default=1, help="number of the first one, where runs are continued"
    )
    play.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds one request may take")
    play.add_argument("--result", type=Path, metavar="FILE.jsonl", help="append requests and summaries to this file")
    play.add_argument(
        "--watch-reads", action="store_true", help="look four times a second at what the ranks wait for from the store"
    )
    play.set_defaults(run=_play)
    return parser


def _describe(args: argparse.Namespace, workload: Workload) -> int:
    classes = [workload.class_at(position) for position in range(len(workload.prompts))]
    shown = {
        **workload.description,
        "shared_share_played": round(workload.sharing.shared_ratio, 5),
        "classes": {name.value: classes.count(name) for name in sorted(set(classes))},
    }
    print(json.dumps(shown, indent=2))
    return 0


def _play(args: argparse.Namespace, workload: Workload) -> int:
    return asyncio.run(_play_all(args, workload))


async def _play_all(args: argparse.Namespace, workload: Workload) -> int:
    about = {"provenance": provenance(), "config": workload.description}
    num_errors = 0
    for repetition in range(args.first_repetition, args.first_repetition + args.repetitions):
        for policy in order_of_repetition(args.policy or [AS_SERVED], repetition):
            head = {
                "trace": workload.description["trace"],
                "label": args.label,
                "policy": policy,
                "repetition": repetition,
            }
            run = await _play_one(args, workload, policy, head)
            num_errors += run["num_errors"]
            print(line_of(run), flush=True)
            if args.result is not None:
                append_lines(args.result, [{**run, **about}])
    return 1 if num_errors else 0


async def _play_one(args: argparse.Namespace, workload: Workload, policy: str, head: dict[str, Any]) -> dict[str, Any]:
    def save(record: Record) -> None:
        if args.result is not None:
            line = {"kind": "request", **head, "class": workload.class_at(record.position).value, **record.to_json()}
            append_lines(args.result, [line])

    async with open_session(args.timeout) as session:
        client = NativeClient(session, args.url, policy_fields(policy))
        # Before anything is played: what a server does not tell is not to be missed at the end of the run.
        queues = [await _look_at_reads(session, args.url)] if args.watch_reads else []
        watch = asyncio.create_task(_watch_reads(session, args.url, queues)) if args.watch_reads else None
        records, total_time_s = await play_cold(args.url, workload, client, arrived=save)
        if watch is not None and not watch.cancel():
            # It has ended by itself: it failed.
            watch.result()
    figures = summary(workload, records, total_time_s=total_time_s)
    return {"kind": "run", **head, **figures, **({"read_queues": read_queues(queues)} if args.watch_reads else {})}


async def _watch_reads(session: aiohttp.ClientSession, url: str, queues: list[list[int]]) -> None:
    """Append what each rank waits for, again and again, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_PERIOD_S)
        queues.append(await _look_at_reads(session, url))


async def _look_at_reads(session: aiohttp.ClientSession, url: str) -> list[int]:
    async with session.get(f"{url}/v1/loads", params={"include": "core"}) as response:
        response.raise_for_status()
        loads = await response.json()
    queue = [load.get("read_queue_tokens") for load in loads["loads"]]
    if not queue or None in queue:
        raise RuntimeError(f"{url} does not tell what its ranks wait for: --watch-reads is for servers with Banyan")
    return queue


def read_queues(queues: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of looks at every rank's queue, in tokens: the longest, and in which share of the looks some rank waited, and in
    which one rank waited for more than the other ones."""
    return {
        "num_looks": len(queues),
        "most_tokens": max((max(look) for look in queues), default=0),
        "waiting_share": round(sum(any(look) for look in queues) / len(queues), 4) if queues else None,
        "uneven_share": round(sum(min(look) != max(look) for look in queues) / len(queues), 4) if queues else None,
    }


def policy_fields(policy: str) -> dict[str, Any]:
    """What a request carries to be placed by `policy`."""
    return {} if policy == AS_SERVED else {"kv_hints": policy_hints({"policy": policy})}


def line_of(run: dict[str, Any]) -> str:
    """One line that says what a run gave."""
    ttft, imbalance = run["ttft_s"] or {}, run["imbalance"]["prompt_tokens"]
    times = "  ".join(f"{name} {ttft[name]:.3f}" for name in ("mean", "p50", "p90", "p99") if name in ttft)
    return (
        f"{run['trace']:>14} {run['label']:>12} {run['policy']:>15} #{run['repetition']}: "
        f"{run['num_completed']} done, {run['num_errors']} failed, {run['total_time_s']:.1f} s; ttft s {times}; "
        f"cached {run['cached_share']} of ideal {run['ideal_cached_share']}; imbalance {imbalance}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        run = args.run
        status: int = run(args, workload_of(args))
    except (ValueError, WarmStart, RuntimeError) as error:
        print(f"trace_replay: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
