# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank's part of the host arena: anonymous, or with a name so that it outlives the server.

A kept part is two files of a folder on tmpfs: ``part-N`` with the frames and ``index-N`` with what they hold. What
the index file names is verified before anybody sees it. Every other frame is given up and made anew: a transfer that
its last process had begun may still write to the memory that it had.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from banyan import _native, config
from banyan.arena.growth import STEP_BYTES, Growth
from banyan.arena.index_file import IndexFile
from banyan.arena.persistence import Checksums, gaps, latest, verified
from banyan.arena.sizing import LEAST_FRAMES, AutoSize
from banyan.layout import BlockGeometry
from banyan.owner import claim_folder, open_own
from banyan.refusals import arena_refusal
from banyan.refusals.start import arena_memory_refusal, kept_arena_refusal
from banyan.sglang_plugin import runtime
from banyan.telemetry import one_thread
from banyan.transport.cuda_ipc.host_pieces import PIECE_BYTES, HostPieces

logger = logging.getLogger("banyan")

LOCK_PATIENCE_S = 30.0
"""A server that was stopped a moment ago may still be giving its memory back."""

NUM_VERIFIERS = 4

AHEAD_STEPS = 2
"""An arena that grows with use has so much of it unused."""
PINNED_AHEAD_STEPS = 32
"""The same of one that a device knows, 2 GiB: its steps rest between."""


@dataclass(frozen=True, slots=True)
class Arena:
    """One rank's part. ``index_file`` is None where nothing is kept, ``growth`` where all of it has memory already.
    ``reserve_bytes`` are to stay free on the machine when it gets memory later; None where it has."""

    memory: _native.SharedBytes
    block: BlockGeometry
    index_file: IndexFile | None = None
    growth: Growth | None = None
    reserve_bytes: int | None = None

    @property
    def num_frames(self) -> int:
        """All that there can be."""
        return self.block.num_frames(self.memory.num_bytes)

    @property
    def num_backed(self) -> int:
        """Frames that have memory."""
        return self.num_frames if self.growth is None else self.growth.num_backed

    def checksums(self, namespace: bytes) -> Checksums:
        """Of this part's pages, under this namespace."""

        def sums(frames: Sequence[int], keys: Sequence[str]) -> list[int]:
            offsets = np.asarray(frames, dtype=np.int64) * self.block.frame_bytes
            return self.memory.checksums(namespace, list(keys), offsets.data, self.block.block_bytes)

        return sums


def allocate(num_bytes: int, block: BlockGeometry) -> Arena:
    """Whole frames of new memory. Refuses when they are none, or do not fit."""
    _check_room(num_bytes, block, present_bytes=0)
    try:
        return Arena(_native.SharedBytes.create(_whole_frames(num_bytes, block), "banyan-arena"), block)
    except OSError as error:
        runtime.refuse(arena_memory_refusal(need_bytes=num_bytes, error=error))


def allocate_sized(
    size: AutoSize, block: BlockGeometry, make: Callable[[AutoSize, BlockGeometry], Arena]
) -> Arena | None:
    """Memory of the size that was chosen for it, as ``make`` takes it. None where there is no room, which is said."""
    if size.part_bytes < LEAST_FRAMES * block.frame_bytes:
        logger.warning("banyan: no host arena: %.2f GiB of memory are free", size.free_bytes / config.GIB)
        return None
    try:
        return make(size, block)
    except OSError as error:
        logger.warning("banyan: no host arena: %s", error)
        return None


def whole(size: AutoSize, block: BlockGeometry) -> Arena:
    """All of it is taken now: a device is going to know it by its address."""
    return Arena(_native.SharedBytes.create(_whole_frames(size.part_bytes, block), "banyan-arena"), block)


def for_device(size: AutoSize, block: BlockGeometry) -> Arena:
    """It is taken with use; what takes it and makes it known to the device is named later."""
    memory = _native.SharedBytes.reserve(_whole_frames(size.part_bytes, block), "banyan-arena")
    return Arena(memory, block, reserve_bytes=size.reserve_bytes)


def growing(size: AutoSize, block: BlockGeometry) -> Arena:
    """It is taken with use."""
    arena, frame_bytes = for_device(size, block), block.frame_bytes

    def back(start: int, stop: int) -> None:
        arena.memory.back(start * frame_bytes, (stop - start) * frame_bytes)

    growth = _growth(
        arena, step_bytes=STEP_BYTES, ahead_steps=AHEAD_STEPS, back=back, num_backed=0, is_resting=lambda: False
    )
    return replace(arena, growth=growth)


def pinned(arena: Arena, pins: HostPieces, *, ahead_steps: int) -> Arena:
    """The part, with frames that are handed out once a device knows their memory; all of it where something is kept."""
    if arena.index_file is not None:
        return arena
    frame_bytes = arena.block.frame_bytes
    growth = _growth(
        arena,
        step_bytes=PIECE_BYTES,
        ahead_steps=ahead_steps,
        back=lambda _start, stop: pins.pin_to(stop * frame_bytes),
        num_backed=pins.num_pinned_bytes // frame_bytes,
        is_resting=lambda: pins.is_resting,
    )
    return replace(arena, growth=growth)


def _growth(
    arena: Arena,
    *,
    step_bytes: int,
    ahead_steps: int,
    back: Callable[[int, int], None],
    num_backed: int,
    is_resting: Callable[[], bool],
) -> Growth:
    frame_bytes = arena.block.frame_bytes
    step_frames = max(1, step_bytes // frame_bytes)

    def has_room(num_frames: int) -> bool:
        if arena.reserve_bytes is None:
            return True
        left_bytes = _native.available_bytes()
        return left_bytes is not None and left_bytes - num_frames * frame_bytes >= arena.reserve_bytes

    return Growth(
        num_frames=arena.num_frames,
        num_backed=num_backed,
        step_frames=step_frames,
        ahead_frames=ahead_steps * step_frames,
        back=back,
        has_room=has_room,
        executor=one_thread("banyan-arena"),
        clock=time.monotonic_ns,
        is_resting=is_resting,
    )


def keep(folder: Path, part: int, *, num_parts: int, num_bytes: int, block: BlockGeometry, namespace: bytes) -> Arena:
    """As ``allocate``, with what the last server on ``folder`` has left, if its pages are of this namespace."""
    frames_path, index_file_path = folder / config.PART_FILE.format(part), folder / f"index-{part}"
    try:
        claim_folder(folder, "--banyan-keep-host-arena")
        if part == 0:
            _remove_surplus(folder, num_parts)
        present_bytes = frames_path.stat().st_size if frames_path.exists() else 0
        _check_room(num_bytes, block, present_bytes=present_bytes)
        memory, has_frames = _open(frames_path, _whole_frames(num_bytes, block))
        num_frames = block.num_frames(memory.num_bytes)
        entries, has_entries = _open(index_file_path, IndexFile.num_bytes(num_frames))
    except (OSError, ValueError) as error:
        runtime.refuse(kept_arena_refusal(folder=folder, error=error))
    index_file = IndexFile(memoryview(entries), page_bytes=block.block_bytes, num_frames=num_frames)
    arena = Arena(memory, block, index_file)
    try:
        if has_frames and has_entries:
            _sift(arena, namespace)
        elif has_frames:
            _renew(arena, kept=())
        else:
            index_file.strike_all()
        return arena
    except OSError as error:
        logger.warning("banyan: the host arena that the last server left is given up: %s", error)
    # Under their lock, which goes with the memory: another server may be waiting for it.
    frames_path.unlink()
    index_file_path.unlink()
    del arena, memory  # Before as much is taken anew.
    return keep(folder, part, num_parts=num_parts, num_bytes=num_bytes, block=block, namespace=namespace)


def _sift(arena: Arena, namespace: bytes) -> None:
    """Strike from the index file what is not to be trusted, and renew every frame that it does not name then."""
    started_s = time.monotonic()
    index_file = arena.index_file
    assert index_file is not None
    left = index_file.entries(namespace)
    with ThreadPoolExecutor(NUM_VERIFIERS, thread_name_prefix="banyan-verify") as executor:
        good = latest(verified(left, arena.checksums(namespace), executor))
    kept = {entry.frame for entry in good}
    index_file.strike([entry.frame for entry in left if entry.frame not in kept])
    _renew(arena, kept=kept)
    taken_s = time.monotonic() - started_s
    logger.info(
        "banyan: host arena: %d pages kept by the last server are good, %d are not; verified in %.1f s",
        len(good),
        len(left) - len(good),
        taken_s,
    )


def _renew(arena: Arena, *, kept: Collection[int]) -> None:
    """Other memory for all frames but the ``kept`` ones."""
    frame_bytes = arena.block.frame_bytes
    for run in gaps(kept, arena.num_frames):
        arena.memory.forget(run.start * frame_bytes, len(run) * frame_bytes)


def _open(path: Path, num_bytes: int) -> tuple[_native.SharedBytes, bool]:
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return _native.SharedBytes.keep(str(path), num_bytes)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def _remove_surplus(folder: Path, num_parts: int) -> None:
    """Parts of a server that had more ranks: nobody would ever use their memory again."""
    for path in folder.iterdir():
        kind, _, number = path.name.partition("-")
        if kind in ("part", "index") and number.isdigit() and int(number) >= num_parts:
            with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
                # Raises where a living server has it.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _check_room(num_bytes: int, block: BlockGeometry, *, present_bytes: int) -> None:
    available_bytes = psutil.virtual_memory().available + present_bytes
    line = arena_refusal(need_bytes=num_bytes, frame_bytes=block.frame_bytes, available_bytes=available_bytes)
    if line is not None:
        runtime.refuse(line)


def _whole_frames(num_bytes: int, block: BlockGeometry) -> int:
    return block.num_frames(num_bytes) * block.frame_bytes
