# SPDX-License-Identifier: Apache-2.0
"""``banyan profile``: measure the prefill times of a running server, and write them to a file.

Each cell of a grid (new tokens x prefix tokens) is a real request: its prefix is put into the rank's tree first, its
new tokens are random. The times are those of the rank's per-layer clock, so nothing of HTTP, queue or detokenizer is in
them. Points off the grid are measured too and kept out of the fit; the error on them is what the fit is worth. The
server must be otherwise idle.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from typing import Any

from banyan import __version__
from banyan.cli.engine import Engine, EngineError
from banyan.pacing import SlackTable
from banyan.planner import ForwardSample, Piece, PrefillCost, Profile, mean_relative_error, profile

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 100, 1000
"""Random prompts use these ids: every vocabulary has them, and 1000 ** page_tokens pages never meet again."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure. Prefixes are multiples of the page, or SGLang would cache less than was asked for."""

    extend_tokens: tuple[int, ...]
    prefix_tokens: tuple[int, ...]
    num_held_out: int
    num_repeats: int
    seed: int

    def cells(self) -> list[Piece]:
        """The grid, one prefix after the other, so that each is put into the tree once."""
        return [(extend, prefix) for prefix, extend in product(self.prefix_tokens, self.extend_tokens)]

    def held_out(self, page_tokens: int) -> list[Piece]:
        """Points between the cells, evenly spread over the logarithm of the lengths."""
        rng = random.Random(self.seed)
        points: set[Piece] = set()
        while len(points) < self.num_held_out:
            extend = _between(rng, self.extend_tokens)
            prefix = _between(rng, self.prefix_tokens) // page_tokens * page_tokens
            if extend not in self.extend_tokens:
                points.add((extend, prefix))
        return sorted(points, key=lambda point: (point[1], point[0]))


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Machine, versions, command and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "banyan": __version__,
    }


def measure(engine: Engine, grid: Grid, *, rank: int, provenance: dict[str, Any], progress: Progress) -> Profile:
    """Measure the grid on one rank and fit it.

    Raises:
        EngineError: when the server cannot be asked or is too small for the grid.
    """
    info = engine.server_info()
    state = _state(engine, rank)
    page_tokens, num_layers = int(info["page_size"]), int(state["num_layers"])
    _check_room(info, grid)
    bench = _Bench(engine, rank, random.Random(grid.seed), progress)
    bench.warm_up(max(grid.extend_tokens))
    if not _state(engine, rank)["forwards"]:
        raise EngineError(
            "the server times no forwards: on a GPU start it with --cuda-graph-backend-prefill disabled, for a prefill "
            "that runs as one CUDA graph shows no layers"
        )
    held_out = bench.measure(grid.held_out(page_tokens), 1)
    rounds = [bench.measure(grid.cells(), 1) for _ in range(grid.num_repeats)]
    samples = [sample for found in rounds for sample in found]
    medians = _medians(samples)
    cells = [ForwardSample((cell,), medians[cell]) for cell in grid.cells()]
    cost = PrefillCost.fit(cells)
    return Profile(
        format=profile.FORMAT,
        model=str(info["model_path"]),
        num_layers=num_layers,
        provenance=provenance,
        samples=samples,
        held_out=held_out,
        held_out_error=mean_relative_error(cost, held_out),
        cost=cost,
        slack=SlackTable.fit(
            grid.extend_tokens,
            grid.prefix_tokens,
            [[medians[extend, prefix] / num_layers for prefix in grid.prefix_tokens] for extend in grid.extend_tokens],
        ),
    )


class _Bench:
    """Runs single prefills and reads their times back from the rank."""

    def __init__(self, engine: Engine, rank: int, rng: random.Random, progress: Progress) -> None:
        self._engine = engine
        self._rank = rank
        self._rng = rng
        self._progress = progress

    def warm_up(self, num_tokens: int) -> None:
        """The first forward of a shape allocates; it is no lesson."""
        for length in (1, num_tokens):
            self._engine.prefill(self._random_ids(length), rank=self._rank)

    def measure(self, points: Sequence[Piece], num_tries: int) -> list[ForwardSample]:
        """One forward for each point; a point that SGLang ran in another shape (evicted, cut) is tried again."""
        samples = []
        prefix_ids: list[int] = []
        for extend, prefix in points:
            if len(prefix_ids) != prefix:
                prefix_ids = self._random_ids(prefix)
                if prefix:
                    self._engine.prefill([*prefix_ids, FIRST_TOKEN_ID], rank=self._rank)
            for _ in range(1 + num_tries):
                found = self._forward((extend, prefix), prefix_ids)
                if found is not None:
                    samples.append(found)
                    self._progress(f"{extend:6d} new after {prefix:6d}: {found.forward_us / 1000:9.2f} ms")
                    break
            else:
                raise EngineError(
                    f"the server does not prefill {extend} new tokens after {prefix} cached ones in one forward: is it "
                    "idle, is its pool large enough, is --chunked-prefill-size as large as the largest --extend?"
                )
        return samples

    def _forward(self, piece: Piece, prefix_ids: list[int]) -> ForwardSample | None:
        first = self._num_forwards()
        self._engine.prefill([*prefix_ids, *self._random_ids(piece[0])], rank=self._rank)
        for forward in _forwards(_state(self._engine, self._rank)):
            if forward[0] >= first and forward[1].pieces == (piece,):
                return forward[1]
        return None

    def _num_forwards(self) -> int:
        return max((number + 1 for number, _ in _forwards(_state(self._engine, self._rank))), default=0)

    def _random_ids(self, length: int) -> list[int]:
        return [FIRST_TOKEN_ID + self._rng.randrange(NUM_TOKEN_IDS) for _ in range(length)]


def _state(engine: Engine, rank: int) -> dict[str, Any]:
    ranks = engine.ranks()
    if rank not in ranks:
        raise EngineError(f"--rank {rank}: the server has ranks {sorted(ranks)}")
    return ranks[rank]


def _forwards(state: dict[str, Any]) -> Iterator[tuple[int, ForwardSample]]:
    for forward in state["forwards"]:
        pieces = tuple((int(extend), int(prefix)) for extend, prefix in forward["pieces"])
        yield int(forward["number"]), ForwardSample(pieces, float(forward["forward_us"]))


def _check_room(info: dict[str, Any], grid: Grid) -> None:
    need = max(grid.extend_tokens) + max(grid.prefix_tokens) + 1
    limits = (("context length", info.get("context_length")), ("pool", info.get("max_total_num_tokens")))
    for name, limit in limits:
        if limit is not None and need > int(limit):
            raise EngineError(
                f"the grid needs {need} tokens, the server's {name} is {limit}: lower --extend or --prefix"
            )


def _medians(samples: Sequence[ForwardSample]) -> dict[Piece, float]:
    by_piece: dict[Piece, list[float]] = {}
    for sample in samples:
        by_piece.setdefault(sample.pieces[0], []).append(sample.forward_us)
    return {piece: statistics.median(times) for piece, times in by_piece.items()}


def _between(rng: random.Random, axis: Sequence[int]) -> int:
    """A length within the axis, evenly spread over its logarithm."""
    low, high = max(1, axis[0]), axis[-1]
    return min(high, round(low * (high / low) ** rng.random()))
