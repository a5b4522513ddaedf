# SPDX-License-Identifier: Apache-2.0
"""Two questions to this GPU about streams, measured, each with its answer in the last line.

    python test/gpu/streams.py

1. Does a copy stream that waits for a drive hold up streams that have nothing to do with it? CUDA maps streams onto
   ``CUDA_DEVICE_MAX_CONNECTIONS`` queues, of which SGLang asks for eight; what lies behind a wait in its queue waits.
2. What does it cost that a copy starts behind the forward in flight? It must, where that forward may still write pages
   that the copy fills; the next forward waits for the first layers. Beside it stands the same copy started at once.

Streams are those that a server opens: of a partition where the driver has one. Measured by the device's clock.
"""

from __future__ import annotations

import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from banyan.transport.cuda_ipc.copy_stream import CopyStreams, open_copy_streams
from banyan.transport.cuda_ipc.driver import CudaDriver

NUM_OTHERS = 32
PATIENCE_S = 0.2
"""Another stream's copy of a few bytes takes some microseconds."""

NUM_ROUNDS = 5
NUM_SMS = 16
FORWARD_S = 0.02
WORTH_S = 0.001
"""Less of a time to first token is not worth another rule of which copy may start when."""


@dataclass(frozen=True, slots=True)
class HeldUp:
    """Of ``num_others`` streams so many had not run while ``num_waiting`` copy streams waited; ``kind`` of streams."""

    kind: str
    num_waiting: int
    num_others: int
    num_held_up: int


def held_up(driver: CudaDriver, waiting: Sequence[int], others: Sequence[int], idle: Callable[[], Any], kind: str):
    """``idle`` is called while nothing has come."""
    word, source = driver.allocate_pinned(64), driver.allocate_pinned(64)
    target = driver.allocate(64 * len(others))
    ctypes.memset(word, 0, 64)
    for stream in waiting:
        driver.wait_flag(stream, word, 1)
    events = [driver.create_event() for _ in others]
    for number, (stream, event) in enumerate(zip(others, events, strict=True)):
        driver.copy_async(target + 64 * number, source, 64, stream)
        driver.record_event(event, stream)
    num_late = _num_left(driver, events, idle)
    ctypes.c_uint32.from_address(word).value = 1
    if _num_left(driver, events, idle):
        raise RuntimeError("streams did not go on when the word was there")
    return HeldUp(kind, len(waiting), len(others), num_late)


def _num_left(driver: CudaDriver, events: Sequence[int], idle: Callable[[], Any]) -> int:
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := sum(not driver.is_event_done(event) for event in events)) and time.monotonic() < deadline_s:
        idle()
    return left


@dataclass(frozen=True, slots=True)
class Start:
    """From the start of the forward in flight: when it ends, and when the next one may begin."""

    in_flight_s: float
    next_s: float


def start_of_next(
    driver: CudaDriver,
    *,
    forward_stream: int,
    copy_stream: int,
    forward: Callable[[], None],
    copies: Sequence[Callable[[], None]],
    is_behind: bool,
    settle: Callable[[], None],
) -> Start:
    """Enqueue a forward, and ``copies``, a group of layers each, behind it or beside it; ``settle`` waits for all."""
    began, ended, may_begin = (driver.create_timing_event() for _ in range(3))
    gate, first = driver.create_event(), driver.create_event()
    driver.record_event(began, forward_stream)
    if not is_behind:
        driver.record_event(gate, forward_stream)
    forward()
    driver.record_event(ended, forward_stream)
    if is_behind:
        driver.record_event(gate, forward_stream)
    driver.wait_event(copy_stream, gate)
    for number, copy in enumerate(copies):
        copy()
        if number == 0:
            driver.record_event(first, copy_stream)
    driver.wait_event(forward_stream, first)
    driver.record_event(may_begin, forward_stream)
    settle()
    return Start(driver.elapsed_s(began, ended), driver.elapsed_s(began, may_begin))


def answer(held: Sequence[HeldUp], behind: Sequence[Start], beside: Sequence[Start]) -> str:
    """Both answers in one line."""
    late = ", ".join(f"{each.num_held_up} of {each.num_others} ({each.num_waiting} {each.kind})" for each in held)
    by_s = statistics.median(start.next_s for start in behind) - statistics.median(start.next_s for start in beside)
    slower_s = statistics.median(s.in_flight_s for s in beside) - statistics.median(s.in_flight_s for s in behind)
    holds = "hold up others" if any(each.num_held_up for each in held) else "hold up nobody"
    pays = "worth a rule" if by_s > WORTH_S else "not worth a rule"
    return (
        f"waiting copy streams {holds}: {late}; a copy beside the forward in flight lets the next one begin "
        f"{by_s * 1e3:.2f} ms earlier and slows the first by {slower_s * 1e3:.2f} ms: {pays}"
    )


def _measure_held_up(driver: Any, opened: CopyStreams) -> list[HeldUp]:
    others = [driver.create_stream() for _ in range(NUM_OTHERS)]
    kinds = (("in a partition" if opened.is_partition else "plain", opened.streams),)
    if opened.is_partition:
        kinds += (("plain", [driver.create_stream() for _ in range(2)]),)
    return [
        held_up(driver, streams[:num], others, lambda: time.sleep(0.001), kind)
        for kind, streams in kinds
        for num in (1, 2)
    ]


def _measure_starts(torch: Any, driver: Any, opened: CopyStreams) -> dict[bool, list[Start]]:
    """8,192 tokens of an 8B model, in groups of four layers, behind and beside matrix products."""
    from banyan_lab.bench.gpu_pools import Lists, Pools, device_place, model_shapes

    shape, num_pages = model_shapes(16)[0], 512
    pools = Pools(shape, [device_place(shape, num_pages) for _ in range(2)])
    order = random.Random(0)
    lists = Lists([1] * num_pages, *(order.sample(range(num_pages), num_pages) for _ in range(2)))
    kernel = pools.kernel(num_programs=opened.num_sms)
    kernel.warm_up(opened.streams[0])
    kernel.num_programs = opened.num_programs(kernel.programs_per_sm(driver.threads_per_sm(driver.current_device())))
    stream = opened.streams[0]
    groups = [range(start, start + 8) for start in range(0, len(shape.extents), 8)]
    copies = [
        lambda extents=extents: kernel.enqueue(stream=stream, lists=lists.lists, target_row=0, extents=extents)
        for extents in groups
    ]
    forward_stream = torch.cuda.Stream()
    left, right = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def products(num: int) -> None:
        with torch.cuda.stream(forward_stream):
            for _ in range(num):
                torch.mm(left, right)

    def run(num: int, is_behind: bool) -> Start:
        return start_of_next(
            driver,
            forward_stream=forward_stream.cuda_stream,
            copy_stream=stream,
            forward=lambda: products(num),
            copies=copies,
            is_behind=is_behind,
            settle=torch.cuda.synchronize,
        )

    run(8, True)
    one_s = run(64, True).in_flight_s / 64
    num = max(1, round(FORWARD_S / one_s))
    starts: dict[bool, list[Start]] = {True: [], False: []}
    for _ in range(NUM_ROUNDS):
        for is_behind, seen in starts.items():
            seen.append(run(num, is_behind))
    return starts


def main() -> int:
    import torch

    torch.zeros(1, device="cuda")
    driver = CudaDriver()
    opened = open_copy_streams(driver, num_sms=NUM_SMS, num_streams=2, try_stream=lambda stream: None)
    held = _measure_held_up(driver, opened)
    starts = _measure_starts(torch, driver, opened)
    found = {
        "streams": opened.note,
        "held_up": [asdict(each) for each in held],
        "behind": [asdict(start) for start in starts[True]],
        "beside": [asdict(start) for start in starts[False]],
    }
    print(json.dumps(found, indent=2))
    print(f"verdict: {answer(held, starts[True], starts[False])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
