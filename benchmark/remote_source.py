# SPDX-License-Identifier: Apache-2.0
"""What it costs a node that it lends: the time between the tokens of its own answers, beside pulls from its arena.

    python -m benchmark.remote --source

Two servers, on a core each. The first answers some requests at once; the time between their tokens is taken. Meanwhile
the second does one of three things, which take turns: nothing (`idle`); it asks prompts again and again that lie in the
first one's arena, and forgets them in between (`pulls`); or it computes prompts that nobody has (`computing`), which
takes the machine's time and none of the first server's.

* `source_tpot_ratio`: beside pulls, to idle. Medians over rounds of the ratio of a round's means.
* `source_tpot_ratio_computing`: beside computing, to idle: what any busy neighbour costs on this machine.
* `pulled_mb_per_s`: what the second server has taken while the first one answered.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.client import NativeClient, open_session
from benchmark.metrics import spread
from benchmark.remote_nodes import Nodes
from benchmark.store_server import prompts

KINDS = ("idle", "pulls", "computing")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    num_rounds: int = 6
    num_answers: int = 4
    question_tokens: int = 100
    answer_tokens: int = 150
    num_lent: int = 6
    lent_tokens: int = 2000


@contextmanager
def again_and_again(step: Callable[[], None]) -> Iterator[None]:
    """Call ``step`` on a thread of its own, over and over, while this is open; raises what it has raised."""
    has_ended = threading.Event()

    def run() -> None:
        while not has_ended.is_set():
            step()

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(run)
        try:
            yield
        finally:
            has_ended.set()
        running.result()


def steps(nodes: Nodes, lent: Sequence[list[int]], rng: random.Random) -> dict[str, Callable[[], None]]:
    """What the second server does, by kind; one request for each call."""
    in_turn = itertools.cycle(enumerate(lent))
    salts = itertools.count()

    def pull() -> None:
        place, ids = next(in_turn)
        if place == 0:
            nodes.forget_at_borrower()
        nodes.borrower.generate(ids)

    def compute() -> None:
        nodes.borrower.generate(rng.choice(lent), cache_salt=f"nobody-{next(salts)}")

    return {"idle": lambda: time.sleep(0.05), "pulls": pull, "computing": compute}


async def _answer_all(url: str, asked: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
    """Seconds between tokens, of all answers.

    Raises:
        RuntimeError: for an answer that failed.
    """
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, url)
        answers = await asyncio.gather(*(client.answer((), ids, num_tokens) for ids in asked))
    for answer in answers:
        if answer.error or len(answer.output_ids) != num_tokens:
            raise RuntimeError(f"an answer failed: {answer.error or answer.output_ids}")
    return [gap_s for answer in answers for gap_s in answer.itl_s]


def measure(model: Path, out: Path, seed: int, sizes: Sizes | None = None) -> dict[str, Any]:
    """One row for each round and kind."""
    sizes = sizes or Sizes()
    rng = random.Random(f"source-{seed}")
    lent = prompts(model, [sizes.lent_tokens] * sizes.num_lent, seed=seed)
    questions = prompts(model, [sizes.question_tokens] * sizes.num_answers, seed=seed + 1)
    rows = []
    with Nodes(model, out) as nodes:
        for ids in lent:
            nodes.lend(ids)
        beside = steps(nodes, lent, rng)
        # The first forwards of a size allocate: no lesson.
        for kind in KINDS:
            _measure_one(nodes, beside[kind], questions, sizes)
        for number, place in itertools.product(range(sizes.num_rounds), range(len(KINDS))):
            kind = KINDS[(place + number) % len(KINDS)]
            rows.append({"round": number, "kind": kind, **_measure_one(nodes, beside[kind], questions, sizes)})
    return {"rows": rows, "sizes": asdict(sizes)}


def _measure_one(
    nodes: Nodes, step: Callable[[], None], questions: Sequence[list[int]], sizes: Sizes
) -> dict[str, float]:
    with again_and_again(step):
        before, start_s = nodes.pulled_bytes(), time.perf_counter()
        gaps_s = asyncio.run(_answer_all(nodes.lender_url, questions, sizes.answer_tokens))
        took_s = time.perf_counter() - start_s
        num_bytes = nodes.pulled_bytes() - before
    return {
        "tpot_s": round(statistics.mean(gaps_s), 5),
        "longest_s": round(max(gaps_s), 5),
        "pulled_mb_per_s": round(num_bytes / took_s / 1e6, 1),
    }


def ratios(rows: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    """By round: the time between tokens beside ``kind``, to idle."""
    found = {(row["round"], row["kind"]): row["tpot_s"] for row in rows}
    return [found[number, kind] / found[number, "idle"] for number in sorted({number for number, _ in found})]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    rows = found["rows"]
    return {
        "source_tpot_ratio": spread(ratios(rows, "pulls")),
        "source_tpot_ratio_computing": spread(ratios(rows, "computing")),
        "pulled_mb_per_s": spread([row["pulled_mb_per_s"] for row in rows if row["kind"] == "pulls"]),
        **found,
    }
