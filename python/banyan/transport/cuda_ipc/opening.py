# SPDX-License-Identifier: Apache-2.0
"""How a peer's pool is opened: piece by piece, on a thread that schedules nothing.

Opening takes a call for each allocation of a GPU, and a quarter of a second for each GiB of the host's memory.

Invariants
  1. What was opened is closed again when a later piece is refused or the peer is given up.
  2. No single call opens more than ``PIECE_BYTES`` of the host's memory: the driver may let others wait for its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.transport.cuda_ipc.description import PoolDescription, Probe
from banyan.transport.cuda_ipc.driver import CopyDriver, DriverError

logger = logging.getLogger("banyan")

PIECE_BYTES = 1 << 30


class GivenUpError(Exception):
    """Nobody wants the peer any more."""


class HostMemory(Protocol):
    """A peer's pool as the native core maps it; mapped for as long as the object lives."""

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def extents(self) -> list[tuple[int, int]]:
        """``(base_bytes, stride_bytes)`` of each."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool that kernels can read: address and stride of each extent, and how to let go of it."""

    bases: Sequence[int]
    strides: Sequence[int]
    num_pages: int
    close: Callable[[], None]
    probe: tuple[bytes, int] | None = None
    """Nonce and address of the owner's probe, where it has one."""

    def check_alignment(self, num_bytes: int) -> None:
        """
        Raises:
            ValueError: when pages lie between the words that the kernel moves.
        """
        if any(number % num_bytes for number in (*self.bases, *self.strides)):
            raise ValueError(f"its pages are not aligned to {num_bytes} bytes")


def p2p_fix_rebuild_cuda_tensor(
    driver: CopyDriver, description: PoolDescription, page_bytes: Sequence[int], go_on: Callable[[], None]
) -> Opened:
    """Open a peer's pool on a GPU, in the device that is current here and not in the one that it lies on: so one
    kernel reads the pools of several GPUs.

    ``page_bytes`` of each extent; ``go_on`` is called before each handle and may raise ``GivenUpError``.

    Raises:
        DriverError: when the driver refuses.
        ValueError: when the pool does not have these extents.
    """
    _check_extents(len(description.extents), page_bytes)
    bases: list[int] = []

    def close() -> None:
        for base in bases:
            _let_go(driver.close_handle, base)

    try:
        for segment in description.segments:
            go_on()
            bases.append(driver.open_handle(segment.handle))
    except (DriverError, GivenUpError):
        close()
        raise
    pairs = zip(description.extents, page_bytes, strict=True)
    return Opened(
        bases=[bases[extent.segment] + extent.offset_bytes for extent in description.extents],
        strides=page_bytes,
        num_pages=min(extent.num_bytes // size for extent, size in pairs),
        close=close,
        probe=None if description.probe is None else _placed_probe(description.probe, bases),
    )


def _placed_probe(probe: Probe, bases: Sequence[int]) -> tuple[bytes, int]:
    return probe.nonce, bases[probe.extent.segment] + probe.extent.offset_bytes


def open_host(driver: CopyDriver, memory: HostMemory, page_bytes: Sequence[int], go_on: Callable[[], None]) -> Opened:
    """Register a peer's memory of the host, so that kernels read it. Arguments and errors as above."""
    _check_extents(len(memory.extents), page_bytes)
    registered: list[int] = []

    mapped = [memory]

    def close() -> None:
        for start in registered:
            _let_go(driver.unregister_host, start)
        # Unregistered before it is unmapped: until here the closure keeps it.
        mapped.clear()

    try:
        address = _register(driver, memory, registered, go_on)
    except (DriverError, ValueError, GivenUpError):
        close()
        raise
    triples = zip(memory.extents, page_bytes, strict=True)
    return Opened(
        bases=[address + base for base, _ in memory.extents],
        strides=[stride for _, stride in memory.extents],
        num_pages=min((memory.num_bytes - base - size) // stride + 1 for (base, stride), size in triples),
        close=close,
    )


def _register(driver: CopyDriver, memory: HostMemory, registered: list[int], go_on: Callable[[], None]) -> int:
    """Register all of ``memory``; the device's address of it. ``registered`` grows with every piece."""
    seen_at = []
    for offset in range(0, memory.num_bytes, PIECE_BYTES):
        go_on()
        num_bytes = min(PIECE_BYTES, memory.num_bytes - offset)
        seen_at.append(driver.register_host_reading(memory.address + offset, num_bytes) - offset)
        registered.append(memory.address + offset)
    if len(set(seen_at)) != 1:
        raise ValueError("its pieces are not adjacent on the device")
    return seen_at[0]


def _check_extents(num_extents: int, page_bytes: Sequence[int]) -> None:
    if num_extents != len(page_bytes):
        raise ValueError(f"{num_extents} extents, this rank's pool has {len(page_bytes)}")


def _let_go(close: Callable[[int], None], address: int) -> None:
    try:
        close(address)
    except DriverError as error:
        # The memory stays mapped until this process ends; there is nothing else that it would break.
        logger.warning("banyan: a mapping of a peer's pool could not be closed: %s", error)
