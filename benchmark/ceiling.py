# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of how much could be found, beside what was so: recorded workloads, played through its counts.

    python -m benchmark.ceiling --data FOLDER

Exact is what sets and an exact cache come to: the ceiling as of a cache that loses nothing, and what a cache of so many
pages finds that evicts the page that was asked for longest ago. A node of each size tells what half of it would find,
all of it, and twice. Nothing is timed but the calls that the scheduler's thread makes. Leaves build/ceiling.json.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan import _native
from banyan.telemetry import WINDOW_MINUTES, NodeReuse, PromptAnswer
from banyan_lab.replay import Trace, TraceError, formats
from benchmark.results import write_report

TRACES = ("lmcache_agent_trace/miniswe.jsonl.gz", "mooncake/conversation_trace.jsonl.gz")
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Sizes of the node, of the distinct pages of a trace."""

TIMES = {"half": 0.5, "same": 1.0, "double": 2.0}
MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Prompt:
    """``pages`` by number, from 0; ``at_s`` from the first prompt on."""

    at_s: float
    num_tokens: int
    pages: tuple[int, ...]


def prompts_of(trace: Trace) -> list[Prompt]:
    """Its prompts by whole pages, of a block each."""
    numbers: dict[tuple[str, int], int] = {}
    made = []
    for request in trace.requests:
        blocks = list(request.block_ids())[: request.num_input_tokens // trace.block_tokens]
        pages = tuple(numbers.setdefault((request.scope, block), len(numbers)) for block in blocks)
        made.append(Prompt(request.at_s - trace.requests[0].at_s, request.num_input_tokens, pages))
    return made


def exact_ceiling(prompts: Sequence[Prompt], page_tokens: int, num_minutes: int) -> float:
    """Of the prompt tokens of the last minutes, those of pages that had been asked for before."""
    last = int(prompts[-1].at_s) // MINUTE_S
    known: set[int] = set()
    num_tokens = num_again = 0
    for prompt in prompts:
        if int(prompt.at_s) // MINUTE_S > last - num_minutes:
            num_tokens += prompt.num_tokens
            num_again += sum(page in known for page in prompt.pages)
        known.update(prompt.pages)
    return num_again * page_tokens / num_tokens


def exact_found(prompts: Iterable[Prompt], page_tokens: int, num_pages: int) -> float:
    """Of the prompts' tokens, those that a cache of so many pages finds that evicts the page that was asked for longest
    ago; of a prompt, its last."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_tokens = num_found = 0
    for prompt in prompts:
        num_tokens += prompt.num_tokens
        num_found += next((at for at, page in enumerate(prompt.pages) if page not in cache), len(prompt.pages))
        for page in reversed(prompt.pages):
            cache.pop(page, None)
            cache[page] = None
        while len(cache) > num_pages:
            cache.popitem(last=False)
    return num_found * page_tokens / num_tokens


class Player:
    """Plays prompts through a rank's counts, as it does in a cache that loses nothing."""

    def __init__(self, prompts: Sequence[Prompt], page_tokens: int, node_pages: int, seed: int) -> None:
        self._prompts = prompts
        self._now_s = 0.0
        self.reuse = NodeReuse(page_tokens, node_pages, seed, lambda: self._now_s)
        self.spent_s = 0.0

    def play(self, names: Sequence[bytes]) -> None:
        """``names``: of pages, as the native core calls them."""
        known: set[int] = set()
        for prompt in self._prompts:
            self._now_s = prompt.at_s
            pages = b"".join(names[page] for page in prompt.pages)
            computed = b"".join(names[page] for page in prompt.pages if page not in known)
            known.update(prompt.pages)
            began_s = time.thread_time()
            self.reuse.asked(pages)
            self.reuse.answered(PromptAnswer(prompt.num_tokens, len(prompt.pages), computed))
            self.spent_s += time.thread_time() - began_s


def figures_of(name: str, prompts: Sequence[Prompt], page_tokens: int, seeds: range) -> Iterator[dict[str, Any]]:
    """A row for each size of the node.

    Raises:
        TraceError: when the trace says nothing of what prompts have in common.
    """
    if not any(prompt.pages for prompt in prompts):
        raise TraceError(f"{name}: no prompt names a whole block")
    num_distinct = 1 + max(page for prompt in prompts for page in prompt.pages)
    keys = [hashlib.sha256(str(page).encode()).hexdigest() for page in range(num_distinct)]
    numbers = _native.page_numbers(keys)
    names = [numbers[at : at + 8] for at in range(0, len(numbers), 8)]
    ceilings = {
        f"hit_ceiling_{end}": exact_ceiling(prompts, page_tokens, minutes) for end, minutes in WINDOW_MINUTES.items()
    }
    for part in PARTS:
        node_pages = int(part * num_distinct)
        curve = {
            f"hit_share_{word}": exact_found(prompts, page_tokens, int(times * node_pages))
            for word, times in TIMES.items()
        }
        told, spent_s = [], []
        for seed in seeds:
            player = Player(prompts, page_tokens, node_pages, seed)
            player.play(names)
            told.append(player.reuse.figures(lambda times, node_pages=node_pages: times * node_pages))
            spent_s.append(player.spent_s)
        exact = ceilings | curve
        yield {
            "trace": name,
            "num_prompts": len(prompts),
            "num_pages": sum(len(prompt.pages) for prompt in prompts),
            "num_distinct_pages": num_distinct,
            "page_tokens": page_tokens,
            "node_pages": node_pages,
            "exact": {figure: round(share, 4) for figure, share in exact.items()},
            "furthest_off": {
                figure: round(max((one[figure] - share for one in told), key=abs), 4) for figure, share in exact.items()
            },
            "us_a_prompt": round(1e6 * sum(spent_s) / len(spent_s) / len(prompts), 1),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.ceiling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded workloads")
    parser.add_argument("--trace", action="append", help=f"in it; give several (default: {', '.join(TRACES)})")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/ceiling.json"))
    args = parser.parse_args(argv)
    rows = []
    try:
        for name in args.trace or TRACES:
            trace = formats.load(args.data / name)
            for row in figures_of(trace.name, prompts_of(trace), trace.block_tokens, range(args.seeds)):
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    except TraceError as error:
        print(f"ceiling: {error}", file=sys.stderr)
        return 2
    write_report(args.out, {"rows": rows}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
