# SPDX-License-Identifier: Apache-2.0
"""Folders and files that are read and written again by later servers: only those of this user, so that nobody else says
what lies in them. The native store has the same rules (``banyan-store/src/owned.rs``)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from banyan.mounts import mounted

WRITABLE_BY_OTHERS = 0o022
OPEN_TO_OTHERS = 0o077
PRIVATE = 0o600
LEAST_SECRET_BYTES = 16
MOST_SECRET_BYTES = 1 << 16
MOUNT_PARENTS = {Path("/"), Path("/mnt"), Path("/media")}  # where drives are mounted by hand
FSTAB = Path("/etc/fstab")


def claim_folder(folder: Path, flag: str) -> None:
    """Make ``folder`` private where it is absent, and look whose it is.

    Raises:
        ValueError: for another user's, one that others may write, or a mount point without its mount; in one line with
            ``flag`` and the way out.
        OSError: when it cannot be made.
    """
    look_at_folder(folder, flag)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    look_at_folder(folder, flag)


def look_at_folder(folder: Path, flag: str) -> Path:
    """Whether ``claim_folder`` would raise ``ValueError``, which this does then; the nearest folder that is there."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if _is_mount_point(nearest) and _is_empty_root(nearest):
        raise ValueError(
            f"{folder} cannot be used ({flag}): {nearest} is an empty directory of the root file system, as a mount "
            f"point is whose drive is not mounted: mount it, or if it is meant: mkdir -p {folder} && chmod 700 {folder}"
        )
    reason = _objection(folder.stat()) if nearest == folder.absolute() else ""
    if reason:
        raise ValueError(
            f"{folder} cannot be used ({flag}): {reason}: chown and chmod go-w it, run as its user, or name a folder "
            "below it, which is made private"
        )
    return nearest


def open_own(path: str | Path, flags: int) -> int:
    """A regular file of this user's, opened as ``os.open`` does. No link is followed, and nobody is waited for.

    Raises:
        PermissionError: for anything else.
        OSError: as ``os.open``.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(f"{path}: it is a link") from error
        raise
    try:
        found = os.fstat(fd)
        reason = (
            _objection(found) if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 else "it is no file of its own"
        )
        if reason:
            raise PermissionError(f"{path}: {reason}")
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _objection(found: os.stat_result) -> str:
    """Why this is not ours, or nothing."""
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        return f"it belongs to user {found.st_uid}, and this process runs as user {user}"
    if found.st_mode & WRITABLE_BY_OTHERS:
        return f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _is_mount_point(folder: Path) -> bool:
    if folder.parent in MOUNT_PARENTS:
        return True
    table = FSTAB.read_text(errors="replace") if FSTAB.exists() else ""
    return any(point == str(folder) for point, _ in mounted(table))


def _is_empty_root(folder: Path) -> bool:
    """An empty directory of the root file system that others may look into, as mount points are."""
    found = folder.stat()
    is_on_root = found.st_dev == os.stat("/").st_dev
    return is_on_root and bool(found.st_mode & OPEN_TO_OTHERS) and folder.is_dir() and not any(folder.iterdir())


def read_private(path: Path, most_bytes: int) -> bytes:
    """The content of a file that nobody else may open.

    Raises:
        OSError: when it cannot be read.
        ValueError: when others may read it, it belongs to somebody else, or it has more bytes than that.
    """
    # Opened first, so that what is judged is what is read; without waiting, should it be a pipe.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise ValueError("it belongs to another user")
        if not stat.S_ISREG(status.st_mode) or status.st_mode & OPEN_TO_OTHERS:
            raise ValueError(f"others may open it (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return content


def read_secret(path: Path) -> bytes:
    """The content of a secret file.

    Raises:
        OSError: when it cannot be read.
        ValueError: as ``read_private``, and when it is too short to be a secret.
    """
    secret = read_private(path, MOST_SECRET_BYTES).strip()
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"{len(secret)} bytes are no secret: use at least {LEAST_SECRET_BYTES} (openssl rand -hex 32)")
    return secret
