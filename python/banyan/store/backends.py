# SPDX-License-Identifier: Apache-2.0
"""The backends of ``--banyan-store``. Files are the native store, which by ``3fs://`` uses threads; what else there is,
features bring (``Parts.stores``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from banyan import _native
from banyan._native import Store
from banyan.feature_list import part, store_schemes
from banyan.mounts import MOUNTS, holds, mounted, short_lock
from banyan.ports import Asked, PageStore, StoreFound
from banyan.store.location import FILE, HF3FS, StoreLocation

HF3FS_TYPES = ("fuse.hf3fs", "hf3fs")


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


@dataclass(frozen=True, slots=True)
class Backend:
    """What stands behind a scheme.

    ``open`` is given a location, a namespace, the bytes of each layer of a page, and what the store may take. It raises
    ValueError for what it refuses, with the way out, and OSError when the system refuses, or a store does not answer.
    ``look`` says in one line what can be said before, writes nothing, and raises as ``open``.
    """

    open: Callable[[StoreLocation, bytes, Sequence[int], Space], PageStore]
    look: Callable[[StoreLocation], str] = lambda location: ""


def open_store(location: StoreLocation, *, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """One writer's access to the store at ``location``, for pages of ``layer_bytes`` for each layer.

    Raises:
        ValueError: for a scheme without a backend, and whatever the backend refuses, with the way out.
        OSError: when the system refuses, or a store does not answer.
    """
    return _backend(location.scheme).open(location, namespace, layer_bytes, space)


def _backend(scheme: str) -> Backend:
    """
    Raises:
        ValueError: where there is none, with those that there are.
    """
    if scheme == FILE:
        return Backend(_open_files, _look_files)
    if scheme == HF3FS:
        return Backend(_open_hf3fs, _look_hf3fs)
    others = store_schemes()
    if scheme not in others:
        schemes = ", ".join(sorted((FILE, HF3FS, *others)))
        raise ValueError(f"{scheme}: there is no such store: use one of {schemes}")
    return cast(Backend, part(others[scheme].backend))


def asked_store(store: PageStore | None) -> Asked[StoreFound] | None:
    """The same store, where it has to be asked what it holds: its ``lookup`` knows only what it has said before."""
    return store if isinstance(store, Asked) else None


def native_store(store: PageStore | None) -> Store | None:
    """The same store, where it is the native one: it can be told whose pages are whose and what goes last, and can say
    what its writer has there."""
    return cast(Store, store) if isinstance(store, Store) else None


def _open_files(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    return _open(location.paths, namespace, layer_bytes, space, engine="auto")


def _open_hf3fs(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """On a mounted 3FS, through its POSIX side. Several nodes may use it, each with shelves of its own.

    Its USRBIO rings are not used.
    """
    _look_hf3fs(location)
    return _open(location.paths, namespace, layer_bytes, space, engine="threads")


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


def look(location: StoreLocation) -> str:
    """What can be said of a store before a server opens it, in one line. Writes nothing.

    Raises:
        ValueError, OSError: what would be refused for it, with the way out.
    """
    return _backend(location.scheme).look(location)


def _look_files(location: StoreLocation) -> str:
    _native.store_preview(list(location.paths))
    path = location.paths[0]
    option = short_lock(MOUNTS.read_text(), os.path.realpath(path))
    if not option:
        return ""
    return f"{path} is mounted with {option}: locks do not reach other nodes, whose shelves are told by signs of life"


def _look_hf3fs(location: StoreLocation) -> str:
    points = [point for point, kind in mounted(MOUNTS.read_text()) if kind in HF3FS_TYPES]
    for path in location.paths:
        real = os.path.realpath(path)
        if not any(holds(point, real) for point in points):
            raise ValueError(f"{path} is on no mounted 3FS: mount it, or name the folder without {HF3FS}://")
    _look_files(location)
    return "on a mounted 3FS, by its POSIX side"
