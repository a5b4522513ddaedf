# SPDX-License-Identifier: Apache-2.0
"""The real server with two ranks on one GPU: conversations whose turns alternate between the ranks, and come twice.

    python test/gpu/server_check.py --model-path M [--conversations 8] [-- further server arguments]

Sharing off, between the pools, and by way of the store after a restart. Prints one JSON object; the exit status is 1
when greedy tokens differ from sharing off, when nothing was fetched, or when sharing makes the scheduler wait for the
device.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

import synchronisations
from engine import Answer, Server

NUM_TURNS = 3
NUM_PROFILED = 2
FIRST_TOKENS = (400, 2000)
TURN_TOKENS = (50, 300)
RUNS = ("first", "second")


def converse(server: Server, num_conversations: int, *, seed: int = 0, first_rank: int = 0) -> list[Answer]:
    """Every turn follows the answer of the one before, on the other rank; contents and lengths are fixed."""
    chance = random.Random(seed)
    answers = []
    for number in range(num_conversations):
        ids: list[int] = []
        for turn in range(NUM_TURNS):
            ids += [chance.randrange(5, 250) for _ in range(chance.randrange(*(TURN_TOKENS if turn else FIRST_TOKENS)))]
            answers.append(server.generate(ids, (first_rank + number + turn) % 2))
            ids = ids + answers[-1].tokens
    return answers


def cached_tokens(answers: list[Answer]) -> Counter[str]:
    """Tokens that were not computed, by where they came from."""
    cached: Counter[str] = Counter()
    for answer in answers:
        cached.update(answer.cached)
    return cached


def summary(answers: list[Answer]) -> dict[str, object]:
    times = sorted(answer.ttft_s for answer in answers)
    return {
        "ttft_p50_s": statistics.median(times),
        "ttft_max_s": times[-1],
        "cached": sum(answer.num_cached_tokens for answer in answers) / sum(a.num_prompt_tokens for a in answers),
        "cached_tokens": dict(cached_tokens(answers)),
    }


class Check:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.answers: dict[str, dict[str, list[Answer]]] = {}
        self.waits: dict[str, Counter[str] | str] = {}

    def serve(self, name: str, *further: str) -> Server:
        args, log = self._args, self._args.log / f"server-{name}.log"
        options = [*further, *args.further]
        return Server(args.model_path, port=args.port, seconds=args.seconds, log=log, further=options)

    def compare(self, share: str) -> None:
        """Serve the same conversations twice, each turn on the other rank than before, then others under the profiler,
        whose times are not kept."""
        server = self.serve(share, "--banyan-share", share)
        try:
            self.answers[share] = {
                run: converse(server, self._args.conversations, first_rank=rank) for rank, run in enumerate(RUNS)
            }
            self._profile(server, share)
        finally:
            server.stop()

    def restart(self) -> None:
        """Serve with a store, stop, and keep the answers of the server that comes up on what it finds there."""
        with tempfile.TemporaryDirectory(dir=self._args.log) as folder:
            for name in ("store-before", "store"):
                server = self.serve(
                    name, "--banyan-host-gb", "1", "--banyan-store", folder, "--banyan-store-admit", "first"
                )
                try:
                    self.answers[name] = {"first": converse(server, self._args.conversations)}
                finally:
                    server.stop()

    def _profile(self, server: Server, name: str) -> None:
        folder = self._args.log / f"profile-{name}"
        # Traces of an earlier check would be counted as well.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        server.call("/start_profile", output_dir=str(folder.resolve()), activities=["CPU", "GPU"])
        converse(server, NUM_PROFILED, seed=1)
        server.call("/stop_profile")
        try:
            self.waits[name] = synchronisations.count(folder)
        except ValueError as error:
            self.waits[name] = str(error)

    def verdict(self) -> dict[str, bool]:
        tokens = {
            name: [[answer.tokens for answer in answers] for answers in runs.values()]
            for name, runs in self.answers.items()
        }
        first = tokens["off"][:1]
        return {
            "tokens_are_those_of_sharing_off": tokens["off"] == tokens["peer"]
            and tokens["store-before"] == first == tokens["store"],
            "pages_came_from_the_peer": self._fetched("peer")["peer"] > 0,
            "pages_came_from_the_store": self._fetched("store")["storage"] > 0,
            "sharing_adds_no_wait_for_the_device": self._adds_no_wait(),
        }

    def _adds_no_wait(self) -> bool:
        off, shared = self.waits["off"], self.waits["peer"]
        # The forwards are the same: what differs is a call of a period, not of a request.
        return isinstance(off, Counter) and isinstance(shared, Counter) and shared.total() <= 1.02 * off.total() + 2

    def _fetched(self, name: str) -> Counter[str]:
        return cached_tokens([answer for answers in self.answers[name].values() for answer in answers])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, default=32150)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--log", type=Path, default=Path("build/gpu"))
    parser.add_argument("further", nargs="*")
    args = parser.parse_args()
    args.log.mkdir(parents=True, exist_ok=True)
    check = Check(args)
    check.compare("off")
    check.compare("peer")
    check.restart()
    verdict = check.verdict()
    result = {
        "num_conversations": args.conversations,
        "num_turns": NUM_TURNS,
        **{name: {run: summary(answers) for run, answers in runs.items()} for name, runs in check.answers.items()},
        "waits_for_the_device": check.waits,
        "verdict": verdict,
    }
    print(json.dumps(result, indent=2))
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
