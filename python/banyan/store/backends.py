# SPDX-License-Identifier: Apache-2.0
"""The backends of ``--banyan-store``. Both are the native store; on a network file system it uses threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from banyan._native import Store
from banyan.ports import PageStore
from banyan.store.location import FILE, StoreLocation

HF3FS = "3fs"
HF3FS_TYPES = ("fuse.hf3fs", "hf3fs")
MOUNTS = Path("/proc/mounts")


@dataclass(frozen=True, slots=True)
class Space:
    """What a store may take.

    Attributes:
        quota_bytes: what all its users may occupy together.
        share_bytes: what this writer may occupy.
        floor_bytes: what stays free on each file system.
        read_bytes_per_s: read no faster than this; None: no limit.
    """

    quota_bytes: int
    share_bytes: int
    floor_bytes: int = 1 << 30
    read_bytes_per_s: int | None = None


def open_store(location: StoreLocation, *, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """One writer's door to the store at ``location``, for pages of ``layer_bytes`` for each layer.

    Raises:
        ValueError: for a scheme without a backend, and whatever the backend refuses, with the way out.
        OSError: when the system refuses.
    """
    backend = BACKENDS.get(location.scheme)
    if backend is None:
        raise ValueError(f"{location.scheme}: there is no such store: use one of {', '.join(sorted(BACKENDS))}")
    return backend(location.paths, namespace, layer_bytes, space)


def _open_files(paths: Sequence[str], namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    return _open(paths, namespace, layer_bytes, space, engine="auto")


def _open_hf3fs(paths: Sequence[str], namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """On a mounted 3FS, through its POSIX side. Several nodes may use it, each with shelves of its own.

    Its USRBIO rings are not used.
    """
    lines = [line.split(" ") for line in MOUNTS.read_text().splitlines()]
    points = [point for _, point, kind, *_ in lines if kind in HF3FS_TYPES]
    for path in paths:
        real = os.path.realpath(path)
        if not any(real == point or real.startswith(point.rstrip("/") + "/") for point in points):
            raise ValueError(f"{path} is on no mounted 3FS: mount it, or name the folder without {HF3FS}://")
    return _open(paths, namespace, layer_bytes, space, engine="threads")


def _open(
    paths: Sequence[str], namespace: bytes, layer_bytes: Sequence[int], space: Space, *, engine: str
) -> PageStore:
    store = Store.open(
        list(paths),
        namespace,
        list(layer_bytes),
        quota_bytes=space.quota_bytes,
        share_bytes=space.share_bytes,
        floor_bytes=space.floor_bytes,
        read_bytes_per_s=space.read_bytes_per_s,
        engine=engine,
    )
    # It reads only what its own lookup has found, as every store does; a protocol cannot say that.
    return cast(PageStore, store)


Backend = Callable[[Sequence[str], bytes, Sequence[int], Space], PageStore]
BACKENDS: Mapping[str, Backend] = MappingProxyType({FILE: _open_files, HF3FS: _open_hf3fs})
