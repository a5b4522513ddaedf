# SPDX-License-Identifier: Apache-2.0
"""The real server with sixteen conversations at once, streamed: with sharing and without.

    python test/gpu/load_check.py --model-path M [--conversations 16] [-- further arguments]

A forward is in flight whenever a page is fetched, evicted, copied down or waited for. Prints one JSON object; the exit
status is 1 when sharing makes allocations wait, tokens come later, or answers change (``under_load`` says how much of
each is allowed), or when nothing came from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine import NUM_TOKENS, ONE_GPU, STAND_IN, Answer, Server, end_on_termination
from server_check import NUM_TURNS, PAGE_TOKENS, turns, verdict_line
from under_load import TIMED, Run, verdict

NUM_WARM = 2
NUM_RANKS = 2


def talk(server: Server, number: int, *, seed: int, step: int) -> list[Answer]:
    """One conversation, whose turns go ``step`` ranks on."""
    answers: list[Answer] = []
    ids: list[int] = []
    for turn, said in enumerate(turns(number, seed)):
        ids = ids + said
        # One token behind whole pages is computed by kernels of its own: Banyan moves a page less there.
        ids += [5] * (len(ids) % PAGE_TOKENS == 1)
        answers.append(server.generate(ids, (number + step * turn) % NUM_RANKS))
        ids = ids + answers[-1].tokens
    return answers


def waited_us(server: Server) -> int:
    return sum(state["alloc_wait_us"] for state in server.rank_states())


def run(server: Server, num_conversations: int, *, seed: int, step: int) -> Run:
    """All conversations at once, of a server that has just been emptied."""
    server.call("/flush_cache?timeout=30")
    before_us, began_s = waited_us(server), time.perf_counter()
    with ThreadPoolExecutor(num_conversations) as executor:
        spoken = list(executor.map(lambda number: talk(server, number, seed=seed, step=step), range(num_conversations)))
    took_s = time.perf_counter() - began_s
    answers = [answer for conversation in spoken for answer in conversation]
    return Run(answers, took_s=took_s, wait_us=waited_us(server) - before_us, num_ranks=NUM_RANKS)


def serve(args: argparse.Namespace, share: str, *, step: int, num_runs: int) -> list[Run]:
    server = Server(
        args.model_path,
        log=args.log / f"server-{share}.log",
        further=["--banyan-share", share, *args.further],
        plugins=[] if args.all_gpus else [ONE_GPU],
    )
    server.wait_until_up(args.seconds)
    try:
        # What is compiled at a first use, and learnt from it.
        run(server, NUM_WARM, seed=3, step=step)
        return [run(server, args.conversations, seed=0, step=step) for _ in range(num_runs)]
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--all-gpus", action="store_true", help="rank r on GPU r, not all on the first")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--log", type=Path, default=Path("build/gpu"))
    parser.add_argument("further", nargs="*")
    args = parser.parse_args()
    end_on_termination()
    args.log.mkdir(parents=True, exist_ok=True)
    first, second = serve(args, "off", step=0, num_runs=2)
    (shared,) = serve(args, "peer", step=1, num_runs=1)
    found = verdict(first, second, shared, num_answers=args.conversations * NUM_TURNS, num_tokens=NUM_TOKENS)
    if STAND_IN in os.environ:
        found = {name: is_met for name, is_met in found.items() if name not in TIMED}
    result = {
        "num_conversations": args.conversations,
        "further": args.further,
        "off": first.figures(),
        "off_again": second.figures(),
        "peer": shared.figures(),
        "verdict": found,
    }
    print(json.dumps(result, indent=2))
    print(f"verdict: {verdict_line(found)}", file=sys.stderr)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
