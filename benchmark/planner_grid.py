# SPDX-License-Identifier: Apache-2.0
"""Does the planner choose the faster action? Every cell of a grid is measured both ways on one running server.

    python -m benchmark.planner_grid --repeats 3

A cell is (own, found, new): a prompt whose first `own` tokens lie in the asked rank's tree, whose next `found` tokens
only a peer holds, and whose last `new` tokens nobody has. It is asked with `move`, with `compute` (both forced, through
`kv_hints`), and without a wish: then the planner decides. Each request has fresh random tokens; actions take turns; one
request at a time; the time is the client's, from request to answer of one token. A choice is right when the median of
the chosen action is the lower one; "no slower" also counts cells whose two medians differ by less than their spread.
Starts its own server, `--dp 2`; writes build/planner-grid/report.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from banyan.cli.engine import Engine
from banyan.cli.model import DEFAULT_TARGET, ensure_model
from banyan.planner import Action
from benchmark.provenance import provenance
from benchmark.servers import Server, ServerSpec, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.workload.generated import random_ids

READER, HOLDER = 1, 0
SERVER_ARGS = ("--device", "cpu", "--max-total-tokens", "20000", "--context-length", "8192", "--sleep-on-idle")


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
        moves = statistics.median(self.planned_moved) > 0
        chosen, other = (move, compute) if moves else (compute, move)
        spread = max(_spread(self.move_s), _spread(self.compute_s))
        return {
            "choice": "move" if moves else "compute",
            "is_fastest": chosen <= other,
            "is_no_slower": chosen <= other + spread,
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


class Grid:
    """Asks one server, cell by cell."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)

    def ask(self, cell: Cell, action: Action | None) -> None:
        """One fresh prompt of the cell's shape, with or without a wish."""
        tokens = random_ids(self._rng, cell.own + cell.found + cell.new)
        if cell.own:
            self._engine.prefill([*tokens[: cell.own], 1], rank=READER, action=Action.COMPUTE)
        self._engine.prefill([*tokens[: cell.own + cell.found], 1], rank=HOLDER, action=Action.MOVE)
        start_s = time.perf_counter()
        meta = self._engine.prefill(tokens, rank=READER, action=action)
        elapsed_s = time.perf_counter() - start_s
        # SGLang leaves the details out when nothing was cached.
        details = meta["cached_tokens_details"] or {"device": 0, "peer": 0}
        moved = details["peer"]
        if details["device"] != cell.own or moved > cell.found:
            raise WrongShape(f"{cell.own, cell.found, cell.new}: cached {details}")
        if action is None:
            cell.planned_s.append(elapsed_s)
            cell.planned_moved.append(moved)
        else:
            if moved != (cell.found if action is Action.MOVE else 0):
                raise WrongShape(f"{cell.own, cell.found, cell.new} with {action.value}: cached {details}")
            (cell.move_s if action is Action.MOVE else cell.compute_s).append(elapsed_s)

    def measure(self, cells: Sequence[Cell], num_repeats: int) -> None:
        """Both actions in turn, then what the planner makes of what it has learnt."""
        for repeat in range(num_repeats):
            for place, cell in enumerate(cells):
                actions = [Action.MOVE, Action.COMPUTE]
                for action in actions if (repeat + place) % 2 else reversed(actions):
                    self.ask(cell, action)
        for cell in cells:
            self.ask(cell, None)


def _spread(times_s: Sequence[float]) -> float:
    """Distance of the median to the farther end."""
    middle = statistics.median(times_s)
    return max(max(times_s) - middle, middle - min(times_s))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.planner_grid", description=__doc__.splitlines()[0])
    lengths = {"type": lambda text: [int(part) for part in text.split(",")], "metavar": "N,N,..."}
    parser.add_argument("--own", default=[0, 512], **lengths)
    parser.add_argument("--found", default=[16, 64, 256, 1024], **lengths)
    parser.add_argument("--new", default=[8, 64, 512], **lengths)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/planner-grid"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    cells = [Cell("peer", own, found, new) for own, found, new in product(args.own, args.found, args.new)]
    with Server(ServerSpec("planner-grid", 2, "on", SERVER_ARGS, cpu_env(dp=2)), model, args.out / "logs") as server:
        wait_ready([server])
        engine = Engine(server.url)
        grid = Grid(engine, args.seed)
        # The first forwards allocate; they are no lesson for anybody.
        grid.ask(Cell("peer", 0, 256, 64), Action.MOVE)
        grid.measure(cells, args.repeats)
        ranks = engine.ranks()
    report = {
        **summarise(cells),
        "cells": [asdict(cell) | cell.verdict() for cell in cells],
        "move_us_per_token": ranks[READER]["move_us_per_token"],
        "plans": ranks[READER]["plans"],
        "config": vars(args) | {"out": None},
        "provenance": provenance(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    for cell in cells:
        verdict = cell.verdict()
        move, compute = (statistics.median(times) * 1000 for times in (cell.move_s, cell.compute_s))
        print(
            f"own {cell.own:5d} found {cell.found:5d} new {cell.new:4d}: move {move:7.1f} ms, "
            f"compute {compute:7.1f} ms, planner {verdict['choice']:7s} loss {verdict['loss']:.1%}"
        )
    print(json.dumps(summarise(cells), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
