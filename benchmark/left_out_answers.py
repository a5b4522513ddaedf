# SPDX-License-Identifier: Apache-2.0
"""What it gives that answers which nobody goes on from leave first: recorded agents on a pool and an arena, with the
rule and without it.

    python -m benchmark.left_out_answers --data FOLDER

The rule, the arena and what is known of a prompt's past are the shipped code (``planner/answer_reuse.py``,
``arena/residency.py``, ``Demand``); the pool is a list by age, whose pages go down to the arena when they leave it.
Recordings name no tokens of answers. So each is played twice: *kept*, with the next prompt of a session as the answer
that it goes on from, and *left out*, with answers of their recorded length behind thoughts of 500 to 2,000 tokens, none
of which is asked for again. Nothing is timed. Leaves build/left-out-answers.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from banyan._native import Demand
from banyan.arena.residency import Residency
from banyan.planner.answer_reuse import Answers
from banyan_lab.replay import Trace, TraceRequest, formats
from banyan_lab.sim.caches import BareFrameTable
from banyan_lab.sim.tree import page_numbers
from benchmark.kept_table import command_of, kept_table
from benchmark.provenance import place_and_time
from benchmark.results import write_report

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "left_out_answers.json"

SHARES = (0.02, 0.05, 0.12, 0.25)
"""Of the distinct pages of a run, those that pool and arena hold together."""
POOL = 0.25
"""Of these, the pool's."""
THOUGHTS = range(500, 2_001)
ANSWERS = ("kept", "left out")


@dataclass(frozen=True)
class Work:
    """A recording, and how its sessions are played: so many, so many of them at a time, so many turns of each."""

    path: str
    num_sessions: int
    num_active: int
    most_turns: int = 400


WORKS = (
    Work("claude_code_traces/claude_code_a.jsonl.gz", 24, 6, 100),
    Work("lmcache_agent_trace/miniswe.jsonl.gz", 1_000, 6),
    Work("tau_bench/gpt-4o-airline.jsonl.gz", 100, 8),
    Work("mooncake/conversation_trace.jsonl.gz", 1_500, 200),
)


@dataclass(frozen=True)
class Turn:
    """Whole pages of a prompt, and of what was answered."""

    prompt: list[int]
    answer: list[int]


class Pages:
    """Names pages of a recording by what stands before them; a page that nobody else has is a name more."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, ...], int] = {}
        self.num_pages = 0

    def of_prompt(self, request: TraceRequest, block_tokens: int) -> list[int]:
        """Of its whole blocks."""
        pages: list[int] = []
        for block in list(request.block_ids())[: request.num_input_tokens // block_tokens]:
            place = (pages[-1] if pages else None, request.scope, block)
            if place not in self._names:
                self._names[place] = self.of_nobody(1)[0]
            pages.append(self._names[place])
        return pages

    def of_nobody(self, num_pages: int) -> list[int]:
        self.num_pages += num_pages
        return list(range(self.num_pages - num_pages, self.num_pages))


def turns_of(
    requests: Sequence[TraceRequest], block_tokens: int, answers: str, pages: Pages, rng: random.Random
) -> list[Turn]:
    """A session as one that keeps its answers, or that leaves them out."""
    prompts = [pages.of_prompt(request, block_tokens) for request in requests]
    turns = []
    for request, prompt, following in zip(requests, prompts, [*prompts[1:], []], strict=True):
        num_tokens = request.num_output_tokens
        if answers == "left out":
            answer = pages.of_nobody((rng.choice(THOUGHTS) + num_tokens) // block_tokens)
        else:
            goes_on = following[: len(prompt)] == prompt
            answer = following[len(prompt) :][: num_tokens // block_tokens] if goes_on else []
        turns.append(Turn(prompt, answer))
    return [turn for turn in turns if turn.prompt]


def in_turn(sessions: list[list[Turn]], num_active: int, rng: random.Random) -> Iterator[Turn]:
    """Some sessions are active at a time; one of them, drawn, asks next."""
    waiting = [iter(turns) for turns in rng.sample(sessions, len(sessions))]
    active: list[Iterator[Turn]] = []
    while waiting or active:
        while waiting and len(active) < num_active:
            active.append(waiting.pop())
        session = rng.choice(active)
        turn = next(session, None)
        if turn is None:
            active.remove(session)
        else:
            yield turn


class Tiers:
    """A pool by age above an arena, with the rule (``answers``) or without it."""

    def __init__(self, pool_pages: int, arena_pages: int, answers: Answers | None) -> None:
        self._num_pool_pages, self._num_arena_pages = pool_pages, arena_pages
        self._answers = answers
        self._demand = Demand(pool_pages)
        self._pool: OrderedDict[str, None] = OrderedDict()
        self._table = BareFrameTable()
        self._arena = Residency(self._table, arena_pages)

    def serve(self, turn: Turn) -> int:
        """How many of the prompt's first pages were found."""
        prompt, answer = [str(page) for page in turn.prompt], [str(page) for page in turn.answer]
        is_new = self._asked(turn.prompt, prompt)
        found = list(takewhile(lambda page: page in self._pool or self._arena.frame(page) is not None, prompt))
        self._touch(prompt)
        for page in reversed(prompt + answer):
            self._pool[page] = None
            self._pool.move_to_end(page)
        if answer:
            self._demand.came(page_numbers(turn.answer))
        if answer and is_new and self._answers is not None:
            self._answers.given(None, prompt[-1], answer)
            self._goes_first(self._answers.cold(answer))
        self._arena.demote(found)
        self._go_down()
        return len(found)

    def _asked(self, numbers: list[int], prompt: list[str]) -> bool:
        """Whether nobody had asked for the last page of it before."""
        is_new = self._demand.asked(page_numbers(numbers), "prompt") < len(numbers)
        self._demand.served("prompt")
        self._demand.came(page_numbers(numbers))
        if self._answers is not None:
            left_out = self._answers.asked(None, prompt)
            self._arena.demote(left_out)
            self._goes_first(left_out)
        return is_new

    def _goes_first(self, pages: Sequence[str]) -> None:
        for page in pages:
            if page in self._pool:
                self._pool.move_to_end(page, last=False)

    def _touch(self, pages: Sequence[str]) -> None:
        self._table.touched.update(frame for page in pages if (frame := self._arena.frame(page)) is not None)

    def _go_down(self) -> None:
        """What has no room in the pool goes down; the first pages of a prompt first."""
        num_over = max(0, len(self._pool) - self._num_pool_pages)
        gone = [self._pool.popitem(last=False)[0] for _ in range(num_over)][::-1]
        self._touch(gone)
        new = [page for page in gone if self._arena.frame(page) is None][: self._num_arena_pages]
        frames = self._arena.claim(len(new), (), new)
        self._arena.publish(frames, new[: len(frames)])
        if self._answers is not None:
            self._arena.demote(self._answers.cold(new[: len(frames)]))


def found_share(turns: Sequence[Turn], num_pages: int, answers: Answers | None) -> float:
    """Of all pages of prompts, those that were found in a pool and an arena of so many pages together."""
    pool_pages = max(1, int(POOL * num_pages))
    tiers = Tiers(pool_pages, num_pages - pool_pages, answers)
    num_found = sum(tiers.serve(turn) for turn in turns)
    return num_found / sum(len(turn.prompt) for turn in turns)


def runs_of(trace: Trace, work: Work, order: int) -> Iterator[dict[str, Any]]:
    """A run for each size, with answers kept and left out."""
    for answers in ANSWERS:
        rng, pages = random.Random(order), Pages()
        sessions = list(trace.sessions().values())
        some = rng.sample(sessions, min(work.num_sessions, len(sessions)))
        played = [turns_of(one[: work.most_turns], trace.block_tokens, answers, pages, rng) for one in some]
        turns = list(in_turn(played, work.num_active, rng))
        for share in SHARES:
            num_pages = int(share * pages.num_pages)
            without, found = found_share(turns, num_pages, None), found_share(turns, num_pages, Answers())
            yield {
                "trace": trace.name,
                "answers": answers,
                "order": order,
                "num_prompts": len(turns),
                "num_distinct_pages": pages.num_pages,
                "share": share,
                "found_without": round(without, 5),
                "found": round(found, 5),
            }


HEAD = "| trace, answers | prompts | " + " | ".join(f"{100 * share:.0f} % of the pages" for share in SHARES) + " |"


def table() -> str:
    """The kept runs: of each size, what is found without the rule, and what it adds. Written by ``make docs``."""
    kept = json.loads(KEPT.read_text())
    config = {**kept["config"], "data": "FOLDER"}
    conditions = f"`{command_of('benchmark.left_out_answers', config)}`, {place_and_time(kept['provenance'])}."
    kinds = dict.fromkeys((run["trace"], run["answers"]) for run in kept["runs"])
    return kept_table(HEAD, (_row(kind, kept["runs"]) for kind in kinds), conditions)


def _row(kind: tuple[str, str], runs: Sequence[Mapping[str, Any]]) -> str:
    own = [run for run in runs if (run["trace"], run["answers"]) == kind]
    cells = [", ".join(kind), f"{sum(run['num_prompts'] for run in own) // len(own):,}"]
    for share in SHARES:
        of_share = [run for run in own if run["share"] == share]
        without = 100 * sum(run["found_without"] for run in of_share) / len(of_share)
        more = [100 * (run["found"] - run["found_without"]) for run in of_share]
        cells.append(f"{without:.1f} % {sum(more) / len(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})")
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.left_out_answers", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded workloads")
    parser.add_argument("--orders", type=int, default=3, help="in which the sessions are played")
    parser.add_argument("--sessions", type=int, help="of each recording at most")
    parser.add_argument("--out", type=Path, default=Path("build/left-out-answers.json"))
    args = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    for work in WORKS:
        some = replace(work, num_sessions=min(work.num_sessions, args.sessions or work.num_sessions))
        trace = formats.load(args.data / work.path)
        for order in range(args.orders):
            for run in runs_of(trace, some, order):
                print(run, file=sys.stderr, flush=True)
                runs.append(run)
    write_report(args.out, {"runs": runs}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
