# SPDX-License-Identifier: Apache-2.0
"""What a traffic class is worth: small messages beside pulls that fill the path.

    python -m benchmark.pd --classes          needs root, `unshare` and `tc`

On a loopback of its own, limited to `LINK_MBIT`, 64 bytes go to and fro, in the high class; and a remote lease is
pulled again and again, by the code that pulls pages of other nodes: with `--banyan-dscp`'s mark, which puts it into the
low class, and with `--banyan-in-flight-kb` at what this path needs (`marked`); with that bound alone (`bounded`); and
without either (`unmarked`). The small messages' processes have the first core, the pulls' the others: what is measured
is the path.

* `high_class_p99_ratio`: the messages' p99 beside marked pulls, to that with nothing beside them;
  `high_class_p99_ratio_bounded` and `_unmarked`: beside pulls that share their class. Medians over rounds.
* `high_class_p99_ratio_copying`: the same beside a process that only copies memory where the pulls were: what a busy
  neighbour takes from the messages' core, without any path.
* `pulls_path_share`: the rate of the marked pulls' bytes, to the path's; `pulls_path_share_bounded`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from banyan.core import Address
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.tcp import TcpCarrier, TcpSource
from banyan.features.nodes.wire import TOKEN_BYTES
from benchmark.own_network import TrafficClasses, figures_inside
from benchmark.provenance import provenance
from benchmark.servers import unwind_on_sigterm

LINK_MBIT = 1000
LOW_DSCP = 8
IN_FLIGHT_BYTES = 112 << 10
"""A millisecond of the path. With half of it remote leases fill the path too, and messages wait no less."""

UNBOUNDED_BYTES = 1 << 30
KINDS = {
    "marked": (LOW_DSCP, IN_FLIGHT_BYTES),
    "bounded": (None, IN_FLIGHT_BYTES),
    "unmarked": (None, UNBOUNDED_BYTES),
}
"""How remote leases travel: mark, and bytes under way at most."""

NUM_ROUNDS = 5
ROUND_S = 6.0
SETTLE_S = 1.0
MESSAGE_BYTES = 64
PIECE_BYTES, NUM_PIECES = 1 << 18, 16
NUM_LAYERS = 30
HOST = "127.0.0.1"


class _Pages:
    """What is lent, or where it comes: the same bytes for every layer."""

    def __init__(self) -> None:
        memory = memoryview(bytearray(PIECE_BYTES * NUM_PIECES))
        self._views = [memory[place * PIECE_BYTES : (place + 1) * PIECE_BYTES] for place in range(NUM_PIECES)]

    def layer(self, layer: int) -> list[memoryview]:
        return list(self._views)


def _lend(ports: Any, dscp: int | None, in_flight_bytes: int) -> None:
    _stand_back()
    pages = _Pages()
    lent = SimpleNamespace(leased_frames=pages)
    remote_leases = SimpleNamespace(find=lambda token: lent, holds=lambda token: True)
    source = TcpSource(
        Address(HOST, 0),
        cast(RemoteLeases, remote_leases),
        num_layers=NUM_LAYERS,
        dscp=dscp,
        in_flight_bytes=in_flight_bytes,
    )
    ports.send(source.port)
    ports.recv()


def _pull(port: int, dscp: int | None, num_bytes: Synchronized[int]) -> None:
    _stand_back()
    pages, carrier = _Pages(), TcpCarrier(dscp)
    while True:
        for _ in carrier.pull(Address(HOST, port), b"t" * TOKEN_BYTES, pages, NUM_LAYERS):
            num_bytes.value += PIECE_BYTES * NUM_PIECES


def _copy(begun: Any) -> None:
    _stand_back()
    source, target = np.ones((2, PIECE_BYTES * NUM_PIECES), np.uint8)
    begun.send(None)
    while True:
        np.copyto(target, source)


def _echo(ports: Any) -> None:
    with _standing_before(), socket.create_server((HOST, 0)) as listener:
        ports.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while message := connection.recv(MESSAGE_BYTES):
                connection.sendall(message)


def _stand_back() -> None:
    """Leave the first core; where there is no other, go behind everybody there."""
    _, *others = sorted(os.sched_getaffinity(0))
    os.sched_setscheduler(0, os.SCHED_OTHER if others else os.SCHED_IDLE, os.sched_param(0))
    if others:
        os.sched_setaffinity(0, others)


@contextlib.contextmanager
def _standing_before() -> Iterator[None]:
    """Have the first core, and go before others there."""
    policy, cores = os.sched_getscheduler(0), os.sched_getaffinity(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, policy, os.sched_param(0))


@contextlib.contextmanager
def _child(target: Callable[..., None], *args: Any) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def pulling(dscp: int | None, in_flight_bytes: int) -> Iterator[Synchronized[int]]:
    """Pulls that fill the path; the number of bytes that have come."""
    num_bytes = cast("Synchronized[int]", multiprocessing.get_context("spawn").Value("q", 0))
    here, there = multiprocessing.Pipe()
    with _child(_lend, there, dscp, in_flight_bytes), _child(_pull, here.recv(), dscp, num_bytes):
        while not num_bytes.value:
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        yield num_bytes


class Messages:
    """A connection on which 64 bytes go to and fro. Use it as a context manager."""

    def __enter__(self) -> Messages:
        here, there = multiprocessing.Pipe()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(_child(_echo, there))
        self._connection = self._stack.enter_context(socket.create_connection((HOST, here.recv())))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def times_us(self, for_s: float) -> list[float]:
        """How long each took there and back, one after the other."""
        with _standing_before():
            return list(self._times_us(time.perf_counter() + for_s))

    def _times_us(self, end_s: float) -> Iterator[float]:
        while (start_s := time.perf_counter()) < end_s:
            self._connection.sendall(b"m" * MESSAGE_BYTES)
            if len(self._connection.recv(MESSAGE_BYTES)) != MESSAGE_BYTES:
                raise ConnectionError("a message came back in parts")
            yield (time.perf_counter() - start_s) * 1e6
            time.sleep(0.001)


def measure_round() -> dict[str, Any]:
    """Nothing, copying, and each kind of pulls beside the messages, in turns."""
    row: dict[str, Any] = {}
    with Messages() as messages:
        row["idle_p99_us"] = _p99(messages.times_us(ROUND_S))
        here, there = multiprocessing.Pipe()
        with _child(_copy, there):
            here.recv()
            row["copying_p99_us"] = _p99(messages.times_us(ROUND_S))
        for name, (dscp, in_flight_bytes) in KINDS.items():
            with pulling(dscp, in_flight_bytes) as num_bytes:
                before, start_s = num_bytes.value, time.perf_counter()
                row[f"{name}_p99_us"] = _p99(messages.times_us(ROUND_S))
                row[f"{name}_bytes_per_s"] = (num_bytes.value - before) / (time.perf_counter() - start_s)
    return row


def _p99(times_us: Sequence[float]) -> float:
    return round(float(np.percentile(times_us, 99)), 1)


def figures(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    def ratio(name: str) -> float:
        return round(statistics.median(row[f"{name}_p99_us"] / row["idle_p99_us"] for row in rows), 4)

    def share(name: str) -> float:
        rate = statistics.median(row[f"{name}_bytes_per_s"] for row in rows)
        return round(rate * 8 / (LINK_MBIT * 1e6), 4)

    return {
        "high_class_p99_ratio": ratio("marked"),
        "high_class_p99_ratio_copying": ratio("copying"),
        "high_class_p99_ratio_bounded": ratio("bounded"),
        "high_class_p99_ratio_unmarked": ratio("unmarked"),
        "pulls_path_share": share("marked"),
        "pulls_path_share_bounded": share("bounded"),
        "classes": {
            "rows": list(rows),
            "sizes": {
                "link_mbit": LINK_MBIT,
                "num_rounds": NUM_ROUNDS,
                "round_s": ROUND_S,
                "in_flight_kb": IN_FLIGHT_BYTES >> 10,
            },
            "provenance": provenance(),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.pd_classes", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    TrafficClasses(link_mbit=LINK_MBIT, low_dscp=LOW_DSCP)
    found = figures([measure_round() for _ in range(NUM_ROUNDS)])
    (args.out / "classes_figures.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(out: Path) -> dict[str, Any]:
    """Run this in a network of its own.

    Raises:
        RuntimeError: when it did not end well; what it has said stands before.
    """
    return figures_inside("benchmark.pd_classes", [], out, "classes_figures.json", "classes were not measured")


if __name__ == "__main__":
    sys.exit(main())
