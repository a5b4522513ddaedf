# SPDX-License-Identifier: Apache-2.0
"""Does the planner choose the faster action? Every cell of a grid is measured both ways on one running server.

    python -m benchmark.planner_grid --source peer --repeats 3

A cell is (source, own, found, new): a prompt whose first `own` tokens lie in the asked rank's tree, whose next `found`
tokens lie only in `source` (a peer's pool, the host arena, the store, a store of 10 MB/s), and whose last `new` tokens
nobody has. It is asked with `move`, with `compute` (both forced, through `kv_hints`), and without a wish: then the
planner decides. Each request has fresh random tokens; actions take turns; one request at a time; the time is the
client's, from request to answer of one token. Cells of up to 64 found tokens, where both actions take nearly as long,
are measured three times as often. A choice is right when the median of the chosen action is the lower one; a plan that
moves a part is an action of its own, and right when its own median is no higher than the lower of the two. "No slower"
also counts cells whose medians differ by less than their spread. Starts its own server; writes
build/planner-grid/SOURCE.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from banyan.planner import Action
from benchmark.engine import Engine
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.store_server import StoreServer
from benchmark.workload.generated import random_ids

COMMON = (*CPU_ENGINE, "--context-length", "8192", "--sleep-on-idle", "--page-size", "16")
PAGE_TOKENS = 16
POOL_TOKENS = 6000
"""Of the servers whose pool is to have forgotten what is found below it."""
SHORT_TOKENS = 64


class WrongShape(RuntimeError):
    """A request did not get what its cell is about."""


@dataclass
class Cell:
    """One cell and what was measured in it, in seconds. `source`: where the found tokens lie."""

    source: str
    own: int
    found: int
    new: int
    move_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    planned_s: list[float] = field(default_factory=list)
    planned_moved: list[int] = field(default_factory=list)

    def verdict(self) -> dict[str, Any]:
        """The choice, whether it was the faster one, and what it lost if it was not."""
        move, compute = statistics.median(self.move_s), statistics.median(self.compute_s)
        times = {self.found: ("move", move), 0: ("compute", compute)}
        num_moved = statistics.median_low(self.planned_moved)
        choice, chosen = times.get(num_moved, ("move a part", statistics.median(self.planned_s)))
        spread = max(_spread(self.move_s), _spread(self.compute_s))
        return {
            "choice": choice,
            "is_fastest": chosen <= min(move, compute),
            "is_no_slower": chosen <= min(move, compute) + spread,
            "loss": max(0.0, chosen / min(move, compute) - 1),
            "gain_of_move": 1 - move / compute,
        }


def summarise(cells: Sequence[Cell]) -> dict[str, Any]:
    """Shares over the grid."""
    verdicts = [cell.verdict() for cell in cells]
    wrong = [verdict["loss"] for verdict in verdicts if not verdict["is_fastest"]]
    return {
        "num_cells": len(cells),
        "fastest_share": sum(verdict["is_fastest"] for verdict in verdicts) / len(verdicts),
        "no_slower_share": sum(verdict["is_no_slower"] for verdict in verdicts) / len(verdicts),
        "largest_loss": max(wrong, default=0.0),
    }


@dataclass(frozen=True)
class Ask:
    """One prompt of a cell's shape; without an action the planner decides."""

    cell: Cell
    action: Action | None
    tokens: list[int]


def plan_asks(cells: Sequence[Cell], num_repeats: int, seed: int) -> list[Ask]:
    """Both actions of every cell in turn, then what the planner makes of what it has learnt."""
    rng = random.Random(seed)

    def ask(cell: Cell, action: Action | None) -> Ask:
        return Ask(cell, action, random_ids(rng, cell.own + cell.found + cell.new))

    # The first forwards allocate; they are no lesson for anybody.
    asks = [ask(Cell(cells[0].source, 0, 256, 64), Action.MOVE)]
    for repeat in range(3 * num_repeats):
        for place, cell in enumerate(cells):
            if repeat < num_repeats or cell.found <= SHORT_TOKENS:
                actions = (Action.MOVE, Action.COMPUTE)
                asks += [ask(cell, action) for action in (actions if (repeat + place) % 2 else reversed(actions))]
    return asks + [ask(cell, None) for _ in range(num_repeats) for cell in cells]


class Grid:
    """Asks one server; `tiers` are the names of the source in `cached_tokens_details`."""

    def __init__(self, engine: Engine, *, reader: int, tiers: Sequence[str]) -> None:
        self._engine = engine
        self._reader = reader
        self._tiers = tiers

    def put(self, ask: Ask, *, rank: int) -> None:
        """Have a rank compute what is to be found."""
        self._engine.prefill([*ask.tokens[: ask.cell.own + ask.cell.found], 1], rank=rank, action=Action.MOVE)

    def measure(self, ask: Ask) -> None:
        """The reader's own part first, then the whole prompt against the clock."""
        cell, action = ask.cell, ask.action
        if cell.own:
            self._engine.prefill([*ask.tokens[: cell.own], 1], rank=self._reader, action=Action.COMPUTE)
        start_s = time.perf_counter()
        meta = self._engine.prefill(ask.tokens, rank=self._reader, action=action)
        elapsed_s = time.perf_counter() - start_s
        # SGLang leaves the details out when nothing was cached.
        details = meta["cached_tokens_details"] or dict.fromkeys(("device", *self._tiers), 0)
        moved = sum(details[tier] for tier in self._tiers)
        if details["device"] != cell.own or moved > cell.found:
            raise WrongShape(f"{cell.source, cell.own, cell.found, cell.new}: cached {details}")
        if action is None:
            cell.planned_s.append(elapsed_s)
            cell.planned_moved.append(moved)
            return
        if moved != (cell.found if action is Action.MOVE else 0):
            raise WrongShape(f"{cell.source, cell.own, cell.found, cell.new} with {action.value}: cached {details}")
        (cell.move_s if action is Action.MOVE else cell.compute_s).append(elapsed_s)


def ask_beside_a_peer(asks: Sequence[Ask], model: Path, out: Path) -> dict[str, Any]:
    """Two ranks: one computes what the other one is to find. The reader's state at the end."""
    holder, reader = 0, 1
    args = (*COMMON, "--max-total-tokens", "20000", "--banyan-host-gb", "0")
    with Server(ServerSpec("planner-peer", 2, "on", args, cpu_env(dp=2)), model, out / "logs") as server:
        wait_ready([server])
        engine = Engine(server.url)
        grid = Grid(engine, reader=reader, tiers=["peer"])
        for ask in asks:
            grid.put(ask, rank=holder)
            grid.measure(ask)
        return engine.ranks()[reader]


def ask_above_the_arena(asks: Sequence[Ask], model: Path, out: Path) -> dict[str, Any]:
    """One rank: it computes all that is to be found, then as many other tokens as its pool holds."""
    args = (*COMMON, "--max-total-tokens", str(POOL_TOKENS), "--banyan-host-gb", "6")
    with Server(ServerSpec("planner-host", 1, "on", args, cpu_env(dp=1)), model, out / "logs") as server:
        wait_ready([server])
        engine = Engine(server.url)
        grid = Grid(engine, reader=0, tiers=["host"])
        for ask in asks:
            grid.put(ask, rank=0)
        others = random.Random(-1)
        for _ in range(POOL_TOKENS // 2000):
            engine.prefill(random_ids(others, 2000), rank=0)
        for ask in asks:
            grid.measure(ask)
        return engine.ranks()[0]


def ask_above_the_store(asks: Sequence[Ask], model: Path, out: Path, *, throttle: Sequence[str] = ()) -> dict[str, Any]:
    """One server computes and stores what the next one, with an empty arena, is to find."""
    store = out / "store"
    shutil.rmtree(store, ignore_errors=True)
    args = ("--max-total-tokens", str(POOL_TOKENS), "--banyan-host-gb", "6", "--banyan-store-gb", "16")
    with StoreServer("planner-writer", store, model, out / "logs", dp=1, args=args) as writer:
        grid = Grid(writer.engine, reader=0, tiers=["storage"])
        for ask in asks:
            grid.put(ask, rank=0)
        num_pages = sum((ask.cell.own + ask.cell.found) // PAGE_TOKENS for ask in asks)
        if (stored := writer.wait_stored(num_pages)) < num_pages:
            raise WrongShape(f"{stored} of {num_pages} pages were stored")
    with StoreServer("planner-store", store, model, out / "logs", dp=1, args=(*args, *throttle)) as reader:
        # A page that was read before its request's turn has come to the arena by then.
        grid = Grid(reader.engine, reader=0, tiers=["storage", "host"])
        for ask in asks:
            grid.measure(ask)
        state = reader.engine.ranks()[0]
    shutil.rmtree(store)
    return state


SOURCES: dict[str, Callable[[Sequence[Ask], Path, Path], dict[str, Any]]] = {
    "peer": ask_beside_a_peer,
    "host": ask_above_the_arena,
    "store": ask_above_the_store,
    # So slow that computing wins in a part of the grid.
    "slow_store": partial(ask_above_the_store, throttle=("--banyan-store-read-mb-per-s", "10")),
}


def _spread(times_s: Sequence[float]) -> float:
    """Distance of the median to the farther end."""
    middle = statistics.median(times_s)
    return max(max(times_s) - middle, middle - min(times_s))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.planner_grid", description=__doc__.splitlines()[0])
    lengths = {"type": lambda text: [int(part) for part in text.split(",")], "metavar": "N,N,..."}
    parser.add_argument("--source", default="peer", choices=list(SOURCES))
    parser.add_argument("--own", default=[0, 512], **lengths)
    parser.add_argument("--found", default=[16, 64, 256, 1024], **lengths)
    parser.add_argument("--new", default=[8, 64, 512], **lengths)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/planner-grid"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    cells = [Cell(args.source, own, found, new) for own, found, new in product(args.own, args.found, args.new)]
    asks = plan_asks(cells, args.repeats, args.seed)
    state = SOURCES[args.source](asks, ensure_model(DEFAULT_TARGET), args.out)
    report = {
        **summarise(cells),
        "cells": [asdict(cell) | cell.verdict() for cell in cells],
        "move_us_per_token": state["move_us_per_token"],
        "plans": state["plans"],
    }
    write_report(args.out / f"{args.source}.json", report, args)
    for cell in cells:
        verdict = cell.verdict()
        move, compute = (statistics.median(times) * 1000 for times in (cell.move_s, cell.compute_s))
        planned = statistics.median(cell.planned_s) * 1000
        print(
            f"own {cell.own:5d} found {cell.found:5d} new {cell.new:4d}: move {move:7.1f}, compute {compute:7.1f} ms, "
            f"planner {verdict['choice']:11s} {cell.planned_moved} {planned:7.1f} ms, loss {verdict['loss']:.1%}"
        )
    print(json.dumps(summarise(cells), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
