# SPDX-License-Identifier: Apache-2.0
"""What a rank asks its GPU once, at the start: what cannot work is refused here, or goes another way with one line."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from banyan import _native
from banyan.config import Config
from banyan.refusals.start import device_refusal, pinning_refusal
from banyan.sglang_plugin import runtime
from banyan.transport.capability import Route, RouteChoice, choose_route
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan.transport.cuda_ipc.gpu_io import WORD_PATIENCE_S, GpuIo, comes_past
from banyan.transport.cuda_ipc.host_pieces import HostPieces, Pinned, look_at_room
from banyan.transport.cuda_ipc.leases import LeaseWord

logger = logging.getLogger("banyan")

NUM_SLOTS = 16
"""Batches that follow reads, at once: SGLang keeps two forwards under way."""


LEASE_WORD_BYTES = 64

_stuck: list[_native.SharedBytes] = []
"""Words that a stream may be looking at for as long as this process lives."""

NO_STREAM_WAITS = "banyan: pages of the store are leased when all their layers have landed: %s"

LINK_PROBE_BYTES = 32 << 20
"""Long enough for the link to be at its speed, short enough for the start."""


def open_driver() -> CudaDriver:
    """The driver. Refuses where there is none."""
    try:
        return CudaDriver()
    except DriverError as error:
        runtime.refuse(device_refusal(f"the CUDA driver cannot be used ({error})"))


def find_route(
    driver: CudaDriver, extents: Iterable[tuple[int, int]], devices: Iterable[int], *, has_arena: bool
) -> RouteChoice:
    """Whether peers read the pool itself, or what of it is in the arena. Refuses where neither works.

    ``devices`` are those of all member slots. One that this process does not see is found out when its peer is opened.
    """
    device = driver.current_device()
    visible = range(driver.num_devices())
    others = {other for other in devices if other in visible and other != device}
    unreachable = {other for other in others if not driver.can_access(device, other)}
    obstacle = _export_obstacle(driver, [address for address, _ in extents])
    reads_others = bool(others - unreachable)
    found = choose_route(obstacle, tuple(sorted(unreachable)), reads_others=reads_others, has_arena=has_arena)
    if found.route is Route.REFUSED:
        runtime.refuse(found.line)
    if found.line:
        logger.warning("banyan: %s", found.line)
    return found


def _export_obstacle(driver: CudaDriver, addresses: Sequence[int]) -> str:
    """Why the driver gives no handle of this memory. Some systems have no CUDA IPC at all."""
    num_unexportable = sum(not driver.is_exportable(address) for address in addresses)
    if num_unexportable:
        return (
            f"{num_unexportable} buffers of the KV pool have no CUDA IPC handle (virtual memory: expandable segments, "
            "memory saver, post-capture sizing or a custom pool)"
        )
    try:
        for base in {driver.allocation_of(address)[0] for address in addresses}:
            driver.export_handle(base)
    except DriverError as error:
        return f"the driver gives no handle of the KV pool to other processes ({error})"
    return ""


def pin_arena(
    driver: CudaDriver, arena: _native.SharedBytes, config: Config, pinned: Pinned, num_bytes: int
) -> HostPieces | None:
    """This rank's part of the arena, with memory and pinned as far as ``num_bytes``, and at least one piece: the rest
    follows when it is needed. Where the driver does not let us, refuses what the user asked for, and says that there is
    no arena where nobody did.
    """
    address = _start_of(arena)

    def register(start: int, size: int) -> int:
        if start != address:
            look_at_room(driver)
        arena.back(start - address, size)
        return driver.register_host(start, size)

    pieces = HostPieces(
        driver,
        address=address,
        num_bytes=arena.num_bytes,
        register=register,
        name="this rank's part of the host arena",
        pinned=pinned,
    )
    try:
        pieces.pin_to(max(num_bytes, 1))
        return pieces
    except (DriverError, OSError, ValueError) as error:
        pieces.close()
        if config.sizes_arena and not config.store:
            logger.warning("banyan: no host arena: it cannot be pinned (%s)", error)
            return None
        runtime.refuse(pinning_refusal(error))


def measure_link(driver: CudaDriver, stream: int, source: int, num_bytes: int) -> float:
    """Bytes a second from pinned memory to the device, by the device's clock; 0.0, with one line, where a device that
    SGLang has filled has no room for it. Waits for it: at the start only."""
    with ExitStack() as after:
        try:
            target = driver.allocate(num_bytes)
            after.callback(driver.free, target)
            events = []
            for _ in range(2):
                events.append(driver.create_timing_event())
                after.callback(driver.destroy_event, events[-1])
        except DriverError as error:
            logger.warning("banyan: how fast the device is reached from the host was not measured: %s", error)
            return 0.0
        driver.copy_async(target, source, num_bytes, stream)
        driver.record_event(events[0], stream)
        driver.copy_async(target, source, num_bytes, stream)
        driver.record_event(events[1], stream)
        torch.cuda.synchronize()
        return num_bytes / max(driver.elapsed_s(*events), 1e-6)


def open_ring(driver: CudaDriver, *, stream: int, frame_bytes: int) -> GpuIo | None:
    """Words by which reads of the store into the arena let ``stream`` go on; None, with one line, where it cannot wait
    for such."""
    words = _native.SharedBytes.create(NUM_SLOTS * _native.FlagRing.SLOT_BYTES, "banyan-ring")
    try:
        address = _pin(driver, words)
    except DriverError as error:
        logger.warning(NO_STREAM_WAITS, error)
        return None
    try:
        has_passed = comes_past(driver, stream, address)
    except DriverError as error:
        # Memory that ends while it is pinned makes the driver refuse whatever is mapped there next.
        driver.unregister_host(_start_of(words))
        logger.warning(NO_STREAM_WAITS, error)
        return None
    if not has_passed:
        _stuck.append(words)
        logger.warning(NO_STREAM_WAITS, f"a stream did not see a word within {WORD_PATIENCE_S:g} s")
        return None
    return GpuIo(driver, _native.FlagRing(words, NUM_SLOTS), address, frame_bytes=frame_bytes)


def open_ends(driver: CudaDriver) -> LeaseWord:
    """A word for one stream that copies leased pages.

    Raises:
        DriverError: when it cannot be pinned.
    """
    word = _native.SharedBytes.create(LEASE_WORD_BYTES, "banyan-ends")
    return LeaseWord(_native.LeaseEnds(word), _pin(driver, word))


def _pin(driver: CudaDriver, memory: _native.SharedBytes) -> int:
    return driver.register_host(_start_of(memory), memory.num_bytes)


def _start_of(memory: _native.SharedBytes) -> int:
    return int(np.frombuffer(memoryview(memory), dtype=np.uint8).ctypes.data)
