# SPDX-License-Identifier: Apache-2.0
"""The native store, on local drives and on a mounted 3FS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from banyan._native import Store

HF3FS_TYPES = ("fuse.hf3fs", "hf3fs")


@dataclass(frozen=True, slots=True)
class Space:
    """What the store may occupy: all its users together, this writer, and what stays free on each file system."""

    quota_bytes: int
    share_bytes: int
    floor_bytes: int = 1 << 30


def open_local(paths: Sequence[str], namespace: bytes, layer_bytes: Sequence[int], space: Space) -> Store:
    """The store striped over ``paths``. Raises as ``Store.open``."""
    return _open(paths, namespace, layer_bytes, space, engine="auto")


def open_hf3fs(
    paths: Sequence[str],
    namespace: bytes,
    layer_bytes: Sequence[int],
    space: Space,
    mounts: Path = Path("/proc/mounts"),
) -> Store:
    """As ``open_local`` on a mounted 3FS, through its POSIX side with threads.

    Several nodes may use it, each with shelves of its own; what another node has published is seen at the next
    ``refresh``. The USRBIO rings of 3FS are not used.

    Raises:
        ValueError: for a path that is on no mounted 3FS.
    """
    points = [line.split(" ")[1] for line in mounts.read_text().splitlines() if line.split(" ")[2] in HF3FS_TYPES]
    for path in paths:
        real = os.path.realpath(path)
        if not any(real == point or real.startswith(point.rstrip("/") + "/") for point in points):
            raise ValueError(f"{path} is on no mounted 3FS: mount it, or use the local store")
    return _open(paths, namespace, layer_bytes, space, engine="threads")


def _open(paths: Sequence[str], namespace: bytes, layer_bytes: Sequence[int], space: Space, *, engine: str) -> Store:
    return Store.open(
        list(paths),
        namespace,
        list(layer_bytes),
        quota_bytes=space.quota_bytes,
        share_bytes=space.share_bytes,
        floor_bytes=space.floor_bytes,
        engine=engine,
    )
