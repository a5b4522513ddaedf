# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor`` says about the folders of a store: what they lie on, and whether it reads as it should.

A file of ``PROBE_BYTES`` is written and read again; it has no name, so nothing stays. ``banyan bench store`` measures
in earnest.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from banyan.cli.doctor_machine import Kernel
from banyan.cli.finding import Finding
from banyan.config import GIB
from banyan.mounts import type_of

PROBE_BYTES = 64 << 20
READ_BYTES = 1 << 20
NUM_READERS = 4
FAST_LINK_GT = 8.0
"""From so many transfers a second on, PCIe sends 128 bits in 130; below, 8 in 10."""
POOR_SHARE = 0.1
"""A drive that gives less than this of its own link is asked about."""
MEMORY_TYPES = ("tmpfs", "ramfs")
LAYER_TYPES = ("overlay", "aufs")
NETWORK_TYPES = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")


def examine_drive(folder: Path, kernel: Kernel, *, read_rate: Callable[[Path], float] | None = None) -> list[Finding]:
    """What ``folder`` lies on, and how fast it is read. ``read_rate`` gives bytes a second."""
    what = f"drive of {folder}"
    # Path.is_dir raises below a folder that its caller may not enter.
    if not os.path.isdir(folder):
        return [Finding(what, False, "no such folder", "make it, on the drive that the store is to use")]
    found = [_place(what, folder, kernel)]
    try:
        bytes_per_s = (read_rate or measured_rate)(folder)
    except OSError as error:
        advice = "the store writes there: give its user the folder, and room"
        return [*found, Finding(f"{what}, speed", False, str(error), advice)]
    link = link_of(folder, kernel)
    return [*found, speed(f"{what}, speed", bytes_per_s, link)]


def examine_store_drive(folder: Path, kernel: Kernel) -> list[Finding]:
    """As ``examine_drive``, of a folder that a server makes where there is none: then of the nearest one above it."""
    there = next(place for place in (folder, *folder.parents) if os.path.isdir(place))
    if there == folder:
        return examine_drive(folder, kernel)
    yet = Finding(f"drive of {folder}", True, f"no such folder yet: a server makes it in {there}")
    return [yet, *examine_drive(there, kernel)]


def _place(what: str, folder: Path, kernel: Kernel) -> Finding:
    kind = file_system(folder, kernel)
    space = os.statvfs(folder)
    detail = f"{kind}, {space.f_bavail * space.f_frsize / GIB:.1f} GiB free"
    if kind in MEMORY_TYPES:
        hint = "this is memory, and gone when the machine restarts: --banyan-host-gb keeps pages in memory"
    elif kind in LAYER_TYPES:
        hint = "this is a layer of the container, gone with it: mount a volume"
    elif kind in NETWORK_TYPES:
        hint = "this is a network file system: every node that shares the folder has shelves of its own"
    else:
        hint = ""
    return Finding(what, True, detail, hint=hint)


def file_system(folder: Path, kernel: Kernel) -> str:
    """The type of the file system that holds ``folder``, as ``/proc/mounts`` has it."""
    return type_of(kernel.text("proc/mounts"), str(folder.resolve()))


def link_of(folder: Path, kernel: Kernel) -> tuple[float, bool] | None:
    """``(bytes a second, runs as fast as it could)`` of the PCIe link of the drive under ``folder``; None where it
    has none that can be seen."""
    device = os.stat(folder).st_dev
    block = (kernel.root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}").resolve()
    for place in (block, *block.parents):
        now, most = (
            [_first_number(place / f"{when}_link_{what}") for what in ("speed", "width")] for when in ("current", "max")
        )
        if all(now):
            per_lane = now[0] * 1e9 * (128 / 130 if now[0] >= FAST_LINK_GT else 0.8) / 8
            return per_lane * now[1], now >= most
    return None


def _first_number(path: Path) -> float:
    try:
        found = re.match(r"[\d.]+", path.read_text())
    except OSError:
        return 0.0
    return float(found[0]) if found else 0.0


def speed(what: str, bytes_per_s: float, link: tuple[float, bool] | None) -> Finding:
    detail = f"{bytes_per_s / 1e6:.0f} MB/s read by {NUM_READERS} readers"
    if link is None:
        return Finding(what, True, f"{detail}; no link of its own to compare with")
    link_bytes_per_s, runs_fully = link
    detail += f", its link could carry {link_bytes_per_s / 1e6:.0f} MB/s"
    if not runs_fully:
        hint = "the link runs below what the drive can do: look at its slot and at lspci -vv (LnkSta)"
        return Finding(what, True, detail, hint=hint)
    if bytes_per_s < POOR_SHARE * link_bytes_per_s:
        hint = "other users of the drive, a full drive, or encryption: measure with `banyan bench store --path DIR`"
        return Finding(what, True, detail, hint=hint)
    return Finding(what, True, detail)


def measured_rate(folder: Path) -> float:
    """Bytes a second that ``NUM_READERS`` readers get, past the page cache where the file system allows that.

    Raises:
        OSError: for a folder that cannot be written, or has no room.
    """
    file = _unnamed_file(folder)
    try:
        os.posix_fallocate(file, 0, PROBE_BYTES)
        block = os.urandom(READ_BYTES)
        for at in range(0, PROBE_BYTES, READ_BYTES):
            os.pwrite(file, block, at)
        os.fsync(file)
        os.posix_fadvise(file, 0, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
        reader = _direct(file)
        try:
            return _read_all(reader)
        finally:
            os.close(reader)
    finally:
        os.close(file)


def _unnamed_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        # NFS and most of FUSE have no such files.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    file, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return file


def _direct(file: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY)


def _read_all(reader: int) -> float:
    failed: list[OSError] = []

    def read(first: int) -> None:
        # Anonymous memory begins at a page, as O_DIRECT wants it.
        with mmap.mmap(-1, READ_BYTES) as buffer:
            try:
                for at in range(first * READ_BYTES, PROBE_BYTES, NUM_READERS * READ_BYTES):
                    os.preadv(reader, [buffer], at)
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(NUM_READERS)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return PROBE_BYTES / (time.perf_counter() - start_s)
