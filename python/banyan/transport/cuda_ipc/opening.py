# SPDX-License-Identifier: Apache-2.0
"""How a peer's pool is opened and closed, on a thread that schedules nothing.

Opening takes a call for each allocation of a GPU. Of the host's memory the first piece is registered: whether that can
be done at all, and where the device sees it. The others follow when a page of theirs is wanted (``host_pieces``).

Invariant: what was opened is closed again when a later handle is refused or the peer is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from banyan import _native
from banyan.transport.cuda_ipc.description import PoolDescription, Probe
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan.transport.cuda_ipc.host_pieces import HostPieces, KeptPieces

logger = logging.getLogger("banyan")


class GivenUpError(Exception):
    """Nobody wants the peer any more."""


@dataclass(frozen=True, slots=True)
class HostFrames:
    """Where frames lie in a memory that is registered piece by piece: ``first`` is the first byte of frame 0, ``last``
    its last one, ``stride`` from one to the next."""

    pieces: HostPieces
    first: int
    last: int
    stride: int

    def missing(self, frames: Sequence[int]) -> set[int]:
        """The pieces that these frames need and that the device does not know yet."""
        if self.pieces.is_whole:
            return set()
        starts = np.asarray(frames, dtype=np.int64) * self.stride
        return self.pieces.missing(starts + self.first, starts + self.last)

    def ahead(self, frames: Sequence[int]) -> list[int]:
        """The pieces that are likely to be wanted next."""
        return [] if self.pieces.is_whole else self.pieces.ahead(max(frames) * self.stride + self.last)


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool that kernels can read: address and stride of each extent, and how to let go of it."""

    bases: Sequence[int]
    strides: Sequence[int]
    num_pages: int
    close: Callable[[], None]
    probe: tuple[bytes, int] | None = None
    """Nonce and address of the owner's probe, where it has one."""
    host: HostFrames | None = None
    """Of the host's memory: which of it the device knows already."""

    def check_alignment(self, num_bytes: int) -> None:
        """
        Raises:
            ValueError: when pages, or the probe, lie between the words that the kernel moves.
        """
        probe = () if self.probe is None else self.probe[1:]
        if any(number % num_bytes for number in (*self.bases, *self.strides, *probe)):
            raise ValueError(f"its pages are not aligned to {num_bytes} bytes")


def p2p_fix_rebuild_cuda_tensor(
    driver: CudaDriver, description: PoolDescription, page_bytes: Sequence[int], go_on: Callable[[], None]
) -> Opened:
    """Open a peer's pool on a GPU, in the device that is current here and not in the one that it lies on: so one
    kernel reads the pools of several GPUs.

    ``page_bytes`` of each extent; ``go_on`` is called before each handle and may raise ``GivenUpError``.

    Raises:
        DriverError: when the driver refuses.
        ValueError: when the pool does not have these extents, or its owner announces more than there is.
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
            _check_size(driver, bases[-1], segment.num_bytes)
    except (DriverError, GivenUpError, ValueError):
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


def _check_size(driver: CudaDriver, base: int, num_bytes: int) -> None:
    """A kernel that reads beyond an allocation ends the context."""
    start, held_bytes = driver.allocation_of(base)
    if not start <= base <= base + num_bytes <= start + held_bytes:
        raise ValueError(f"{num_bytes} bytes are announced at {base:#x}, {held_bytes} lie at {start:#x}")


def _placed_probe(probe: Probe, bases: Sequence[int]) -> tuple[bytes, int]:
    return probe.nonce, bases[probe.extent.segment] + probe.extent.offset_bytes


def open_host(
    registrations: KeptPieces,
    memory: _native.PeerMemory,
    page_bytes: Sequence[int],
    go_on: Callable[[], None],
    name: str,
) -> Opened:
    """Register the front of a peer's memory of the host, so that kernels can read it. ``name`` is for the log.
    Arguments and errors as above.

    Raises:
        ValueError: also when it is no array of frames.
    """
    _check_extents(len(memory.extents), page_bytes)
    (stride, *others) = {stride for _, stride in memory.extents}
    if others:
        raise ValueError(f"frames of {stride} and of {others[0]} bytes")
    go_on()
    pieces = registrations.take(memory, name)
    ends = [base + size for (base, _), size in zip(memory.extents, page_bytes, strict=True)]
    first = min(base for base, _ in memory.extents)
    return Opened(
        bases=[pieces.device_address + base for base, _ in memory.extents],
        strides=[stride] * len(page_bytes),
        num_pages=(memory.num_bytes - max(ends)) // stride + 1,
        close=partial(registrations.give_back, memory.identity),
        host=HostFrames(pieces, first=first, last=max(ends) - 1, stride=stride),
    )


def _check_extents(num_extents: int, page_bytes: Sequence[int]) -> None:
    if num_extents != len(page_bytes):
        raise ValueError(f"{num_extents} extents, this rank's pool has {len(page_bytes)}")


def _let_go(close: Callable[[int], None], address: int) -> None:
    try:
        close(address)
    except DriverError as error:
        # The memory stays mapped until this process ends; there is nothing else that it would break.
        logger.warning("banyan: a mapping of a peer's pool could not be closed: %s", error)
