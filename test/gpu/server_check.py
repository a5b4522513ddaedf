# SPDX-License-Identifier: Apache-2.0
"""The real server with two ranks: conversations whose turns alternate between the ranks, against the same conversations
each on one rank of a server that shares nothing.

    python test/gpu/server_check.py --model-path M [--cases pools,store] [--conversations 8] [-- further arguments]

``pools``: between the pools; with ``--banyan-host-gb`` also through the arena. ``store``: after a restart, by way of
the store. Prints one JSON object; the exit status is 1 when a greedy token differs from sharing off behind the same
cached prefix, when a hit is further from an empty cache than SGLang's own hits are, when nothing was fetched, or when
sharing makes the scheduler wait for the device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import synchronisations
from comparison import NOISY_DRAFTS, Comparison, compare, divergence, is_near, more_verified
from engine import (
    MIXED_WINDOWS,
    ONE_GPU,
    SMALL_PIECES,
    STAND_IN,
    WITHOUT_DRAFT_ROWS,
    WITHOUT_INDEX_KEYS,
    Answer,
    Server,
    end_on_termination,
    seeing,
)

PAGE_TOKENS = 16
NUM_TURNS = 3
NUM_PROFILED = 2
NUM_SCORED = 4
FIRST_TOKENS = (400, 2000)
TURN_TOKENS = (50, 300)
PINNED = ("num_pinned_host_bytes", "pinning_us", "num_pinning_device_bytes")
"""What each rank says of the host's memory that its GPU knows, and of what that took."""
SHARES = ("off", "peer")
MIN_COMPARED = 0.5
"""Of all answers. A page that was published a moment too late for the next turn makes another shape."""


def turns(number: int, seed: int) -> list[list[int]]:
    """What a user says, turn by turn."""
    chance = random.Random(f"{seed}-{number}")
    lengths = [chance.randrange(*(TURN_TOKENS if turn else FIRST_TOKENS)) for turn in range(NUM_TURNS)]
    return [[chance.randrange(5, 250) for _ in range(length)] for length in lengths]


def converse(server: Server, num_conversations: int, *, seed: int = 0, first_rank: int = 0, step: int) -> list[Answer]:
    """Every turn follows the answer of the one before, ``step`` ranks on; contents and lengths are fixed."""
    answers = []
    for number in range(num_conversations):
        ids: list[int] = []
        for turn, said in enumerate(turns(number, seed)):
            ids += said
            # One token behind whole pages is computed by kernels of its own: Banyan moves a page less there.
            ids += [5] * (len(ids) % PAGE_TOKENS == 1)
            answers.append(server.generate(ids, (first_rank + number + step * turn) % 2))
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


WITHOUT_HANDLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Pools in memory that no other process can open: what ranks on GPUs without peer access do, on one GPU."""


def environment_of(*, gpus: str, staged: bool) -> dict[str, str]:
    """GPUs that do not read each other are staged by themselves."""
    return seeing(gpus) if gpus else WITHOUT_HANDLES if staged else {}


class Check:
    """Answers of every server, in the order of its runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.answers: dict[str, list[Answer]] = {}
        self.runs: dict[str, dict[str, object]] = {}
        self.waits: dict[str, Counter[str] | str] = {}
        self.divergences: dict[str, float] = {}
        self.alloc_wait_us: dict[str, int] = {}
        self.pinned: dict[str, dict[str, int]] = {}
        self._starting: dict[str, Server] = {}

    def start(self, name: str, *further: str) -> Server:
        args, log = self._args, self._args.log / f"server-{name}.log"
        # A scheduler that has nothing to do keeps a core busy, which those beside it need to start.
        options = [*(["--sleep-on-idle"] if args.at_once else []), *further, *args.further]
        plugins = [*([] if args.all_gpus or args.gpus else [ONE_GPU]), *([args.damaged] if args.damaged else [])]
        return Server(
            args.model_path,
            log=log,
            further=options,
            plugins=[*plugins, *([SMALL_PIECES] if args.small_pieces else [])],
            environment=environment_of(gpus=args.gpus, staged=args.staged),
        )

    def serve(self, name: str, *further: str) -> Server:
        """A server that is up."""
        server = self._starting.pop(name, None) or self.start(name, *further)
        server.wait_until_up(self._args.seconds)
        return server

    def start_both(self) -> None:
        """Those of ``between_pools``: they come up beside each other."""
        for share in SHARES:
            self._starting[share] = self.start(share, "--banyan-share", share)

    def stop_rest(self) -> None:
        """What was started and never served."""
        for server in self._starting.values():
            server.stop()

    def _keep(self, name: str, **runs: list[Answer]) -> None:
        self.answers[name] = [answer for answers in runs.values() for answer in answers]
        self.runs[name] = {run: summary(answers) for run, answers in runs.items()}

    def between_pools(self, share: str) -> None:
        """Serve the same conversations twice, then score hits, then serve others under the profiler, whose times are
        not kept. Sharing off: a conversation stays on its rank, so that its cached prefixes are those of a rank that
        fetches them. Else: every turn is on the other rank, the second time also on another than the first."""
        step, later = (0, 0) if share == "off" else (1, 1)
        server = self.serve(share, "--banyan-share", share)
        try:
            num = self._args.conversations
            first = converse(server, num, step=step)
            self._keep(share, first=first, second=converse(server, num, first_rank=later, step=step))
            self._score(server, share, hit_on=step)
            self._profile(server, share, step)
            states = server.rank_states()
            self.alloc_wait_us[share] = sum(state["alloc_wait_us"] for state in states)
            self.pinned[share] = {name: sum(state.get(name, 0) for state in states) for name in PINNED}
        finally:
            server.stop()

    def _score(self, server: Server, name: str, *, hit_on: int) -> None:
        """How far hits on the rank ``hit_on`` are from what rank 0 computes with an empty cache. A hit is a prompt with
        its answer: a model with sliding windows can be restored where a request ended, not in the middle of one."""
        nears = []
        for number in range(NUM_SCORED):
            prompt = turns(number, seed=2)[0]
            known = prompt + server.generate(prompt, 0).tokens
            output = server.generate(known, 0).tokens
            server.call("/flush_cache?timeout=30")
            empty, _ = server.score(known, output, 0)
            server.call("/flush_cache?timeout=30")
            server.generate(prompt, 0)
            hit, cached = server.score(known, output, hit_on)
            if hit_on and not (cached.get("peer") or cached.get("host")):
                continue  # It was not a hit: there is nothing to learn.
            nears.append(divergence(empty, hit))
        if nears:
            self.divergences[name] = statistics.fmean(nears)

    def restart(self) -> None:
        """Serve with a store, stop, and keep the answers of the server that comes up on what it finds there."""
        num = self._args.conversations
        with tempfile.TemporaryDirectory(dir=self._args.log) as folder:
            for name in ("store-before", "store"):
                server = self.serve(
                    name, "--banyan-host-gb", "1", "--banyan-store", folder, "--banyan-store-admit", "first"
                )
                try:
                    self._keep(name, first=converse(server, num, step=1))
                finally:
                    server.stop()

    def _profile(self, server: Server, name: str, step: int) -> None:
        if self._args.no_profile:
            return
        folder = self._args.log / f"profile-{name}"
        # Traces of an earlier check would be counted as well.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        server.call("/start_profile", output_dir=str(folder.resolve()), activities=["CPU", "GPU"])
        converse(server, NUM_PROFILED, seed=1, step=step)
        server.call("/stop_profile")
        try:
            self.waits[name] = synchronisations.count(folder)
        except ValueError as error:
            self.waits[name] = str(error)

    def comparisons(self) -> dict[str, Comparison]:
        off = self.answers["off"]
        return {name: compare(off, answers) for name, answers in self.answers.items() if name != "off"}

    def verdict_on_damage(self) -> dict[str, bool]:
        """Pages came without what belongs to them: that must show. The model verifies what a draft says."""
        damage = {"tokens_are_others": self.comparisons()["peer"].num_different > 0}
        if self._args.damaged == WITHOUT_DRAFT_ROWS:
            damage = {
                "tokens_are_the_same": self.comparisons()["peer"].num_different == 0,
                "fewer_drafts_are_accepted": self.more_verified()["peer"] > NOISY_DRAFTS,
            }
        return {"pages_came_from_the_peer": cached_tokens(self.answers["peer"])["peer"] > 0, **damage}

    def more_verified(self) -> dict[str, float]:
        off = self.answers["off"]
        return {name: more_verified(off, answers) for name, answers in self.answers.items() if name != "off"}

    def verdict(self) -> dict[str, bool]:
        comparisons = self.comparisons()
        found = {
            "tokens_are_those_of_sharing_off_behind_the_same_prefix": all(
                comparison.num_different == 0 for comparison in comparisons.values()
            ),
            "enough_was_compared": all(
                comparison.share_compared >= MIN_COMPARED for comparison in comparisons.values()
            ),
            "as_many_drafts_are_accepted": all(more <= NOISY_DRAFTS for more in self.more_verified().values()),
        }
        if "peer" in self.answers:
            fetched = cached_tokens(self.answers["peer"])
            found["pages_came_from_the_peer"] = fetched["peer"] + fetched["host"] > 0
            if self._args.staged:
                found["pages_came_by_the_arena_alone"] = fetched["host"] > 0 == fetched["peer"]
            found["hits_are_as_near_as_sglangs_own"] = "peer" in self.divergences and is_near(
                self.divergences["peer"], self.divergences["off"]
            )
            if not self._args.no_profile:
                found["sharing_adds_no_wait_for_the_device"] = self._adds_no_wait()
        if "store" in self.answers:
            found["pages_came_from_the_store"] = cached_tokens(self.answers["store"])["storage"] > 0
        return found

    def _adds_no_wait(self) -> bool:
        off, shared = self.waits["off"], self.waits["peer"]
        # The forwards are the same: what differs is a call of a period, not of a request.
        return isinstance(off, Counter) and isinstance(shared, Counter) and shared.total() <= 1.02 * off.total() + 2


def verdict_line(verdict: dict[str, bool]) -> str:
    """What did not hold, or that all did."""
    failed = [name.replace("_", " ") for name, holds in verdict.items() if not holds]
    return f"not so: {'; '.join(failed)}" if failed else f"all {len(verdict)} conditions hold"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--cases", default="pools,store")
    parser.add_argument("--all-gpus", action="store_true", help="rank r on GPU r, not all on the first")
    parser.add_argument("--gpus", default="", help="rank r on the r-th of these, as 2,5")
    parser.add_argument("--small-pieces", action="store_true", help="pin the arena in small pieces")
    parser.add_argument(
        "--damaged",
        choices=(WITHOUT_INDEX_KEYS, WITHOUT_DRAFT_ROWS, MIXED_WINDOWS),
        help="pages travel without these, or land elsewhere; then tokens must differ, or fewer drafts be accepted",
    )
    parser.add_argument("--staged", action="store_true", help="no pool can be opened: all must come by the arena")
    parser.add_argument(
        "--at-once",
        action="store_true",
        default=os.environ.get("JOBS", "1") != "1",
        help="start the server without sharing and that with it beside each other (default where there are JOBS)",
    )
    parser.add_argument(
        "--no-profile",
        action="store_true",
        default=STAND_IN in os.environ,
        help="do not count waits for the device: to write down what the profiler saw takes a minute",
    )
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--log", type=Path, default=Path("build/gpu"))
    parser.add_argument("further", nargs="*")
    args = parser.parse_args()
    end_on_termination()
    args.log.mkdir(parents=True, exist_ok=True)
    check, cases = Check(args), args.cases.split(",")
    try:
        if args.at_once and "pools" in cases:
            check.start_both()
        check.between_pools("off")
        if "pools" in cases:
            check.between_pools("peer")
        if "store" in cases:
            check.restart()
    finally:
        check.stop_rest()
    verdict = check.verdict_on_damage() if args.damaged else check.verdict()
    result = {
        "num_conversations": args.conversations,
        "num_turns": NUM_TURNS,
        "further": args.further,
        **check.runs,
        "compared": {name: asdict(comparison) for name, comparison in check.comparisons().items()},
        "divergence_nats": check.divergences,
        "more_verified": check.more_verified(),
        "waits_for_the_device": check.waits,
        "alloc_wait_us": check.alloc_wait_us,
        "pinned": check.pinned,
        "verdict": verdict,
    }
    print(json.dumps(result, indent=2))
    print(f"verdict: {verdict_line(verdict)}", file=sys.stderr)
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
