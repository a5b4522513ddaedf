# SPDX-License-Identifier: Apache-2.0
"""What it costs a node that it lends: the time between the tokens of its own answers, beside pulls from its arena.

    python -m benchmark.remote --source     needs root, `unshare` and `tc`; else the path is not bounded

Two servers, and between them a path of `LINK_MBIT` for what is lent. The second server stays on the second core, and so
does this program: no thread of the reader, nor of who asks, takes the first core's time. The first server computes with
one thread and has both cores, so that the threads that lend find one beside that (they share it with all that is said
before); or it has the first core alone (`one_core`), and what lends takes the time of what computes. It answers some
requests at once; the time between their tokens is taken. Meanwhile the second server does one of three things, which
take turns: nothing (`idle`); it asks prompts again and again that lie in the first one's arena, and forgets them in
between (`pulls`); or it computes prompts that nobody has (`computing`), which takes the machine's time and nothing of
the first server.

* `source_tpot_ratio`: beside pulls, to idle. Medians over rounds of the ratio of a round's means.
* `source_tpot_ratio_computing`: beside computing, to idle: what any busy neighbour costs on this machine.
* `pulled_mb_per_s`: what the second server has taken while the first one answered.
* The same with `_one_core`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark import own_network
from benchmark.client import NativeClient, open_session
from benchmark.metrics import spread
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.remote_nodes import Nodes
from benchmark.servers import free_port, unwind_on_sigterm
from benchmark.store_server import prompts

LINK_MBIT = 1000
FIGURES = "source_figures.json"
KINDS = ("idle", "pulls", "computing")
BOTH, ONE_CORE = "", "_one_core"
"""Which cores the first server has, as the figures' names end."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Sizes:
    num_rounds: int = 6
    num_answers: int = 4
    question_tokens: int = 100
    answer_tokens: int = 100
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


def measure(out: Path, seed: int) -> dict[str, Any]:
    """The figures, over a path that is bounded where this program may make one.

    Raises:
        RuntimeError: when nothing was measured; what was said before stands.
    """
    model = ensure_model(DEFAULT_TARGET)
    if not own_network.is_possible():
        print("[source] no network of its own (root, unshare, tc): the path is not bounded", file=sys.stderr)
        return figures(_measure(model, out, seed, Sizes(), free_port))
    otherwise = "nothing was measured over a bounded path"
    return own_network.figures_inside("benchmark.remote_source", ["--seed", str(seed)], out, FIGURES, otherwise)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.remote_source", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    own_network.SlowPorts().limit(LINK_MBIT)
    found = _measure(ensure_model(DEFAULT_TARGET), args.out, args.seed, Sizes(), lambda: own_network.SLOW_PORTS.start)
    (args.out / FIGURES).write_text(json.dumps({**figures(found), "link_mbit": LINK_MBIT}, indent=1) + "\n")
    return 0


def _measure(model: Path, out: Path, seed: int, sizes: Sizes, choose_port: Callable[[], int]) -> dict[str, Any]:
    """One row for each way, round and kind."""
    ways = ways_of(sorted(os.sched_getaffinity(0)))
    lent = prompts(model, [sizes.lent_tokens] * sizes.num_lent, seed=seed)
    questions = prompts(model, [sizes.question_tokens] * sizes.num_answers, seed=seed + 1)
    rows = []
    for way, cores in ways.items():
        os.sched_setaffinity(0, {int(cores[1])})
        with Nodes(model, out / f"servers{way}", choose_port=choose_port, cores=cores) as nodes:
            beside = steps(nodes, lent, random.Random(f"source-{seed}"))
            for ids in lent:
                nodes.lend(ids)
            rows += [{"way": way, **row} for row in _measure_way(nodes, beside, questions, sizes)]
    return {"rows": rows, "sizes": asdict(sizes), "cores": ways}


def ways_of(allowed: Sequence[int]) -> dict[str, tuple[str, str]]:
    """The cores of the first server and of the second, by way; one way where there is only one core."""
    first, *others = allowed
    if not others:
        return {ONE_CORE: (str(first), str(first))}
    second = others[0]
    return {BOTH: (f"{first},{second}", str(second)), ONE_CORE: (str(first), str(second))}


def _measure_way(
    nodes: Nodes, beside: Mapping[str, Callable[[], None]], questions: Sequence[list[int]], sizes: Sizes
) -> Iterator[dict[str, Any]]:
    # The first forwards of a size allocate: no lesson.
    for kind in KINDS:
        _measure_one(nodes, beside[kind], questions, sizes)
    for number, place in itertools.product(range(sizes.num_rounds), range(len(KINDS))):
        kind = KINDS[(place + number) % len(KINDS)]
        yield {"round": number, "kind": kind, **_measure_one(nodes, beside[kind], questions, sizes)}


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
    """Of all ways that were measured."""
    by_way = {way: [row for row in found["rows"] if row["way"] == way] for way in found["cores"]}
    named = {name + way: figure for way, rows in by_way.items() for name, figure in _figures_of(rows).items()}
    return {**named, **found}


def _figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "source_tpot_ratio": spread(ratios(rows, "pulls")),
        "source_tpot_ratio_computing": spread(ratios(rows, "computing")),
        "pulled_mb_per_s": spread([row["pulled_mb_per_s"] for row in rows if row["kind"] == "pulls"]),
    }


if __name__ == "__main__":
    sys.exit(main())
