# SPDX-License-Identifier: Apache-2.0
"""Is a stored prefix better read whole when its request comes, or through a window of layers while it is copied?

    python -m benchmark.read_window --path DIR

A window holds the first layers of all pages; when a layer has been copied into the pool, its memory is read into again.
It cannot move on before the request's turn: until then there is no pool page to copy to. Two parts:

- how fast both come from the drive, with the store as it is shipped, turn by turn on one path (cold, O_DIRECT);
- what follows for the time to first token, from these rates or others (``--drive-gbps``) and the prefill of an H800 as
  the simulator has it: with an arena that lends enough, with one that does not (the rest is computed), and with a
  window of as much memory.

Writes build/read_window/report.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from banyan._native import SharedBytes, Store
from banyan_lab.bench.store.blocks import SHAPES, Blocks, Shape
from banyan_lab.bench.store.ours import OurStore
from banyan_lab.sim.compute import PrefillModel, deepseek_rates
from banyan_lab.sim.llms import llm
from benchmark.results import write_report

GIB = 1 << 30
EIGHT_B = SHAPES[1]
WINDOW_LAYERS = (2, 8)
NUM_ROUNDS = 7
SUFFIX_TOKENS = 1024
MODELS = (("llama3-8b", 1), ("qwen2-5-32b", 2), ("deepseek-v3", 8))
"""And on how many GPUs each is computed."""


class Window:
    """Pages whose layers come ``num_layers`` at a time into each half of a bounded memory."""

    def __init__(self, blocks: Blocks, num_layers: int, path: Path) -> None:
        shape = blocks.shape
        self._blocks, self._num_groups = blocks, shape.num_layers // num_layers
        group = Shape("part of a page", num_layers, shape.layer_bytes)
        self._half_bytes = group.block_bytes * blocks.num_blocks
        self._memory = SharedBytes.create(2 * self._half_bytes, "window")
        self._pool = np.zeros(self._half_bytes, dtype=np.uint8)
        self._halves = np.frombuffer(self._memory, dtype=np.uint8).reshape(2, -1)
        self._halves[:] = 1
        starts = np.arange(2 * blocks.num_blocks, dtype=np.int64) * group.block_bytes
        self._offsets = starts.reshape(2, -1)
        self._store = Store.open(
            [str(path)],
            b"w" * 32,
            [shape.layer_bytes] * num_layers,
            quota_bytes=2 * shape.num_bytes + (64 << 20),
            floor_bytes=0,
            backlog_bytes=2 * shape.num_bytes,
        )
        self._keys = [blocks.fresh_keys() for _ in range(self._num_groups)]
        for keys in self._keys:
            self._store.put(keys, None, self._memory, self._offsets[0])
            if self._store.sync():
                raise RuntimeError("the store could not write")

    def read_s(self) -> float:
        """Ask for the next layers as soon as those before them have been copied away."""
        began_s = time.perf_counter()
        under_way = [self._start(group) for group in range(2)]
        for group in range(self._num_groups):
            if under_way[group].finish():
                raise RuntimeError("pages failed")
            np.copyto(self._pool, self._halves[group % 2])
            if group + 2 < self._num_groups:
                under_way.append(self._start(group + 2))
        return time.perf_counter() - began_s

    def _start(self, group: int) -> Any:
        found = self._store.lookup(self._keys[group])
        offsets = self._offsets[group % 2]
        return self._store.read(found, self._blocks.num_blocks, self._memory, offsets, layers_per_step=1)

    def close(self) -> None:
        self._store.close()


def measure(place: Path, num_rounds: int) -> dict[str, list[float]]:
    """GB/s of each round: pages whole, in the order of layers, and through windows of so many layers."""
    blocks = Blocks(EIGHT_B)
    ours = OurStore(blocks, place / "pages")
    windows = {num: Window(blocks, num // 2, place / f"window-{num}") for num in WINDOW_LAYERS}
    ways = {"whole pages": ours.get_s, "at arrival": ours.layerwise_read_s}
    ways |= {f"window of {num} layers": window.read_s for num, window in windows.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, read_s in ways.items():
            rates[name].append(EIGHT_B.num_bytes / read_s() / 1e9)
    for store in (ours, *windows.values()):
        store.close()
    return rates


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of ``prefix_tokens`` in the store and ``SUFFIX_TOKENS`` behind them, whose turn comes after ``queue_s``;
    ``lent_bytes`` of memory to read into."""

    model: str
    num_gpus: int
    prefix_tokens: int
    lent_bytes: float
    drive_bytes_per_s: float
    queue_s: float


def first_token_s(case: Case, *, has_window: bool) -> float:
    """From the request's arrival on. Without a window what finds no memory is computed; with one it is read after the
    request's turn has come. Moving runs ahead of the forward layer by layer."""
    model = llm(case.model)
    prefill = PrefillModel(model, deepseek_rates().prefill_flops_per_s * case.num_gpus)
    token_bytes, layers = model.kv_bytes_per_token, model.num_layers
    num_early = min(case.prefix_tokens, case.lent_bytes / token_bytes)
    num_late = case.prefix_tokens - num_early
    num_read = case.prefix_tokens if has_window else num_early
    move_s = max(0.0, num_early * token_bytes / case.drive_bytes_per_s - case.queue_s)
    move_s += (num_read - num_early) * token_bytes / case.drive_bytes_per_s
    new_tokens = SUFFIX_TOKENS + (0 if has_window else num_late)
    compute_s = prefill.linear_s(new_tokens) + prefill.attention_s(new_tokens=new_tokens, cached_tokens=num_read)
    return case.queue_s + (move_s + max(move_s, compute_s) * (layers - 1) + compute_s) / layers


def table(drive_gbps: Sequence[float]) -> list[dict[str, Any]]:
    """For each case: read as far as the arena lends, the same with a window, and with an arena that lends enough."""
    rows = []
    for (model, num_gpus), tokens, gib, gbps, queue_s in product(MODELS, (32768, 131072), (1, 4), drive_gbps, (0, 5)):
        prefix_bytes = tokens * llm(model).kv_bytes_per_token
        lacking = Case(model, num_gpus, tokens, gib * GIB, gbps * 1e9, queue_s)
        enough = Case(model, num_gpus, tokens, prefix_bytes, gbps * 1e9, queue_s)
        rows.append(
            {
                "model": model,
                "num_gpus": num_gpus,
                "prefix_tokens": tokens,
                "prefix_gib": prefix_bytes / GIB,
                "lent_gib": gib,
                "drive_gbps": gbps,
                "queue_s": queue_s,
                "computes_the_rest_s": first_token_s(lacking, has_window=False),
                "window_s": first_token_s(lacking, has_window=True),
                "lends_enough_s": first_token_s(enough, has_window=False),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.read_window", description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="measure the drive here; without it only the table")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--drive-gbps", type=lambda text: [float(part) for part in text.split(",")], default=[2.4, 7.0])
    parser.add_argument("--out", type=Path, default=Path("build/read_window"))
    args = parser.parse_args(argv)
    rates: dict[str, list[float]] = {}
    if args.path is not None:
        with tempfile.TemporaryDirectory(dir=args.path, prefix="banyan-window-") as folder:
            rates = measure(Path(folder), args.rounds)
    rows = table(args.drive_gbps)
    write_report(args.out / "report.json", {"gbps": rates, "rows": rows}, args)
    for name, gbps in rates.items():
        print(f"{name:20s} {statistics.median(gbps):.2f} GB/s ({min(gbps):.2f}-{max(gbps):.2f})")
    for row in rows:
        print(
            "  ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
