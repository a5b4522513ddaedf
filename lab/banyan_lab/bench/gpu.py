# SPDX-License-Identifier: Apache-2.0
"""What moving pages costs on this GPU: copies against a device-to-device copy of as many bytes, launches, waits, the
way to the host and back against one pinned copy.

A and B alternate; times are CUDA events, medians with the smallest and largest. GB/s counts each byte copied once.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from banyan.transport.cuda_ipc.copy_stream import BACKUP_PROGRAMS
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan_lab.bench.gpu_pools import Lists, Pools, Shape, arena_place, device_place, model_shapes

NUM_ROUNDS = 9
COPIED_BYTES = 1 << 30
ARENA_BYTES = 256 << 20
SM_COUNTS = (8, 16, 32, 64, 132, 264)
TILE_SIZES = (16 * 1024, 32 * 1024, 64 * 1024)
PAGE_TOKENS = (16, 64)
NUM_CALLS = 1000


def run() -> list[dict[str, Any]]:
    """One row for each measurement.

    Raises:
        SystemExit: where there is no CUDA GPU.
    """
    try:
        import torch

        driver = CudaDriver() if torch.cuda.is_available() else None
    except (ImportError, DriverError) as error:
        raise SystemExit(f"banyan bench gpu: {error}") from error
    if driver is None:
        raise SystemExit("banyan bench gpu: no CUDA GPU on this machine")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    rows: list[dict[str, Any]] = [_hardware(torch)]
    for page_tokens in PAGE_TOKENS:
        for shape in model_shapes(page_tokens):
            rows += _copies(torch, shape)
            rows += _arena(torch, driver, shape)
    rows.append(_launches(torch))
    rows.append(_waits(torch, driver))
    return rows


def _hardware(torch: Any) -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "what": "hardware",
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "num_rounds": NUM_ROUNDS,
    }


def _copies(torch: Any, shape: Shape) -> list[dict[str, Any]]:
    """Scattered pages from one pool to another, over grid and tile sizes."""
    num_pages = max(COPIED_BYTES // shape.block_bytes, 1)
    pools = Pools(shape, [device_place(shape, num_pages + 1) for _ in range(2)])
    order = random.Random(0)
    lists = Lists([1] * num_pages, *(order.sample(range(num_pages + 1), num_pages) for _ in range(2)))
    num_bytes = num_pages * shape.block_bytes
    flat = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    stream = torch.cuda.current_stream().cuda_stream
    rows = []
    for tile_bytes in TILE_SIZES:
        for num_programs in SM_COUNTS:
            kernel = pools.kernel(num_programs=num_programs, tile_bytes=tile_bytes)
            times = _alternate(
                torch,
                lambda kernel=kernel: kernel.enqueue(
                    stream=stream, lists=lists.lists, target_row=0, extents=range(len(shape.extents))
                ),
                lambda: flat[0].copy_(flat[1]),
            )
            rows.append(
                {
                    "what": "copy",
                    "shape": shape.name,
                    "num_pages": num_pages,
                    "num_bytes": num_bytes,
                    "num_programs": num_programs,
                    "tile_bytes": tile_bytes,
                    **_rates(times, num_bytes, "copy", "device_copy"),
                }
            )
    return rows


def _arena(torch: Any, driver: CudaDriver, shape: Shape) -> list[dict[str, Any]]:
    """Full Blocks up and down: the kernel over mapped memory, and batched copies, against one pinned copy."""
    num_pages = max(ARENA_BYTES // shape.block_bytes, 1)
    pools = Pools(shape, [device_place(shape, num_pages), arena_place(shape, num_pages)])
    num_bytes = num_pages * shape.block_bytes
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    order = random.Random(0).sample(range(num_pages), num_pages)
    stream = torch.cuda.Stream()
    kernel = pools.kernel(num_programs=BACKUP_PROGRAMS)
    rows = []
    for way, source_row, target_row in (("up", 1, 0), ("down", 0, 1)):
        lists = Lists([source_row] * num_pages, order, order[::-1])
        sides = (device, host) if way == "up" else (host, device)
        batch = _batch(pools, source_row, target_row, order)
        candidates: dict[str, Callable[[], Any]] = {
            "kernel": lambda lists=lists, row=target_row: kernel.enqueue(
                stream=stream.cuda_stream, lists=lists.lists, target_row=row, extents=range(len(shape.extents))
            ),
            "batched copies": lambda batch=batch: copy_batch(driver, *batch, stream=stream.cuda_stream),
        }
        for name, candidate in candidates.items():
            row = {"what": f"arena {way}", "shape": shape.name, "engine": name, "num_bytes": num_bytes}
            try:
                with torch.cuda.stream(stream):
                    times = _alternate(torch, candidate, lambda sides=sides: sides[0].copy_(sides[1], True))
                rows.append({**row, **_rates(times, num_bytes, "copy", "pinned_copy")})
            except DriverError as error:
                rows.append({**row, "error": str(error)})
    return rows


def _batch(pools: Pools, source_row: int, target_row: int, order: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Targets, sources and sizes of one copy for each extent of each page."""
    targets, sources, sizes = [], [], []
    for source_page, target_page in zip(order, reversed(order), strict=True):
        for number, size in enumerate(pools.shape.extents):
            source, target = pools.places[source_row][number], pools.places[target_row][number]
            sources.append(source.data_ptr() + source_page * source.stride(0))
            targets.append(target.data_ptr() + target_page * target.stride(0))
            sizes.append(size)
    return targets, sources, sizes


def copy_batch(driver: CudaDriver, targets: list[int], sources: list[int], sizes: list[int], *, stream: int) -> None:
    """Many copies in one call, each ordered by the stream. CUDA 12.8 or newer; not the default stream.

    Raises:
        DriverError: when the driver refuses.
    """
    cuda = driver._cuda
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    to, from_ = ([cuda.CUdeviceptr(address) for address in side] for side in (targets, sources))
    driver._call("cuMemcpyBatchAsync", to, from_, sizes, len(sizes), [attributes], [0], 1, stream)


def _launches(torch: Any) -> dict[str, Any]:
    """What a launch costs the calling thread, and the device for one page."""
    shape = model_shapes(16)[0]
    pools = Pools(shape, [device_place(shape, 2) for _ in range(2)])
    kernel, lists = pools.kernel(num_programs=16), Lists([1], [0], [1])
    stream = torch.cuda.current_stream().cuda_stream

    def launch() -> None:
        kernel.enqueue(stream=stream, lists=lists.lists, target_row=0, extents=range(2))

    launch()
    torch.cuda.synchronize()
    return {
        "what": "launch of one layer, one page",
        "caller_us": _call_us(torch, launch),
        "device_us": statistics.median(_event_ms(torch, launch) for _ in range(NUM_ROUNDS)) * 1000,
    }


def _waits(torch: Any, driver: CudaDriver) -> dict[str, Any]:
    """What waiting for a layer that has landed costs the calling thread, and a flag of mapped memory the stream."""
    stream = driver.create_stream()
    event = driver.create_event()
    driver.record_event(event, stream)
    torch.cuda.synchronize()
    word = driver.allocate_pinned(64)
    ctypes.c_uint32.from_address(word).value = 1
    return {
        "what": "wait for a layer that has landed",
        "caller_us": _call_us(torch, lambda: driver.wait_event(stream, event)),
        "flag_caller_us": _call_us(torch, lambda: driver.wait_flag(stream, word, 1)),
        "num_calls": NUM_CALLS,
    }


def _call_us(torch: Any, call: Callable[[], Any]) -> float:
    """Median microseconds of the calling thread for each call, over rounds of ``NUM_CALLS``."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        torch.cuda.synchronize()
        started_ns = time.perf_counter_ns()
        for _ in range(NUM_CALLS):
            call()
        rounds.append((time.perf_counter_ns() - started_ns) / NUM_CALLS / 1000)
    return statistics.median(rounds)


def _event_ms(torch: Any, call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _alternate(torch: Any, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Milliseconds of both, in turn; each was run once before."""
    one()
    other()
    torch.cuda.synchronize()
    pairs = [(_event_ms(torch, one), _event_ms(torch, other)) for _ in range(NUM_ROUNDS)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _rates(times: tuple[list[float], list[float]], num_bytes: int, name: str, ceiling: str) -> dict[str, float]:
    """GB/s of both, and the ratio of each round: median, smallest, largest."""
    ratios = [other / one for one, other in zip(*times, strict=True)]
    return {
        f"{name}_gbps": num_bytes / statistics.median(times[0]) / 1e6,
        f"{ceiling}_gbps": num_bytes / statistics.median(times[1]) / 1e6,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
