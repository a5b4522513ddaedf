# SPDX-License-Identifier: Apache-2.0
"""The backends of ``--banyan-store``. Files are the native store, which on a network file system uses threads; what
keeps values by name is a ``KeyedStore`` over the library of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from banyan import _native
from banyan._native import Store
from banyan.core import Address
from banyan.ports import PageStore, TellingStore
from banyan.store.form import ValueForm
from banyan.store.keyed import KeyedStore
from banyan.store.location import FILE, HF3FS, MOONCAKE, NIXL_POSIX, StoreLocation
from banyan.store.mooncake import MooncakeOptions, MooncakeValues, load_library, own_host
from banyan.store.nixl_files import NixlFiles, new_agent
from banyan.store.values import Values

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
        OSError: when the system refuses, or a store does not answer.
    """
    backend = BACKENDS.get(location.scheme)
    if backend is None:
        raise ValueError(f"{location.scheme}: there is no such store: use one of {', '.join(sorted(BACKENDS))}")
    return backend(location, namespace, layer_bytes, space)


def asked_store(store: PageStore | None) -> KeyedStore | None:
    """The same store, where it has to be asked what it holds: its ``lookup`` knows only what it has said before."""
    return store if isinstance(store, KeyedStore) else None


def telling_store(store: PageStore | None) -> TellingStore | None:
    """The same store, where its writer can say what it has there."""
    return cast(TellingStore, store) if isinstance(store, Store) else None


def _open_files(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    return _open(location.paths, namespace, layer_bytes, space, engine="auto")


def _open_hf3fs(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """On a mounted 3FS, through its POSIX side. Several nodes may use it, each with shelves of its own.

    Its USRBIO rings are not used.
    """
    _look_hf3fs(location)
    return _open(location.paths, namespace, layer_bytes, space, engine="threads")


def _open_mooncake(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """How much it holds is what its clients lend, not ``space``'s quota."""
    value_bytes = ValueForm(tuple(layer_bytes)).value_bytes
    options = MooncakeOptions.parse(location.options)
    values = MooncakeValues(Address.parse(location.host), options, value_bytes=value_bytes)
    return _keyed(values, namespace, layer_bytes, space)


def _open_nixl_posix(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    form = ValueForm(tuple(layer_bytes))
    values = NixlFiles(
        location.paths,
        value_bytes=form.value_bytes,
        is_aligned=form.is_aligned,
        quota_bytes=space.quota_bytes,
        floor_bytes=space.floor_bytes,
    )
    return _keyed(values, namespace, layer_bytes, space)


def _keyed(values: Values, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    rate = space.read_bytes_per_s
    store = KeyedStore(values, namespace=namespace, layer_bytes=layer_bytes, read_bytes_per_s=rate)
    # As with the native store: it reads only what its own lookup has found.
    return cast(PageStore, store)


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
    found = LOOKS.get(location.scheme)
    return "" if found is None else found(location)


def _look_files(location: StoreLocation) -> str:
    _native.store_preview(list(location.paths))
    return ""


def _look_hf3fs(location: StoreLocation) -> str:
    lines = [line.split(" ") for line in MOUNTS.read_text().splitlines()]
    points = [point for _, point, kind, *_ in lines if kind in HF3FS_TYPES]
    for path in location.paths:
        real = os.path.realpath(path)
        if not any(real == point or real.startswith(point.rstrip("/") + "/") for point in points):
            raise ValueError(f"{path} is on no mounted 3FS: mount it, or name the folder without {HF3FS}://")
    _look_files(location)
    return "on a mounted 3FS, by its POSIX side"


def _look_mooncake(location: StoreLocation) -> str:
    options = MooncakeOptions.parse(location.options)
    load_library()
    host = own_host(Address.parse(location.host))
    return f"its library loads, the master answers; this machine would be {options.host or host}"


def _look_nixl_posix(location: StoreLocation) -> str:
    new_agent("banyan-doctor")
    return "NIXL has its POSIX plugin"


LOOKS: Mapping[str, Callable[[StoreLocation], str]] = MappingProxyType(
    {FILE: _look_files, HF3FS: _look_hf3fs, MOONCAKE: _look_mooncake, NIXL_POSIX: _look_nixl_posix}
)
Backend = Callable[[StoreLocation, bytes, Sequence[int], Space], PageStore]
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {FILE: _open_files, HF3FS: _open_hf3fs, MOONCAKE: _open_mooncake, NIXL_POSIX: _open_nixl_posix}
)
