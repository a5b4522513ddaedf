# SPDX-License-Identifier: Apache-2.0
"""Stores that keep values by name, each behind a library of its own: how one is opened, and looked at before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from banyan.core import Address
from banyan.features.stores.keyed import KeyedStore
from banyan.features.stores.mooncake import MooncakeOptions, MooncakeValues, load_library, own_host
from banyan.features.stores.nixl_files import FLAG, FOLDER, NixlFiles, new_agent
from banyan.features.stores.value_format import ValueFormat
from banyan.features.stores.values import Values
from banyan.owner import look_at_folder
from banyan.ports import PageStore
from banyan.store.backends import Backend, Space
from banyan.store.location import StoreLocation


def _open_mooncake(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    """How much it holds is what its clients lend, not ``space``'s quota."""
    value_bytes = ValueFormat(tuple(layer_bytes)).value_bytes
    options = MooncakeOptions.parse(location.options)
    values = MooncakeValues(Address.parse(location.host), options, value_bytes=value_bytes)
    return _keyed(values, namespace, layer_bytes, space)


def _open_nixl_posix(location: StoreLocation, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    value_format = ValueFormat(tuple(layer_bytes))
    values = NixlFiles(
        location.paths,
        value_bytes=value_format.value_bytes,
        is_aligned=value_format.is_aligned,
        quota_bytes=space.quota_bytes,
        floor_bytes=space.floor_bytes,
    )
    return _keyed(values, namespace, layer_bytes, space)


def _keyed(values: Values, namespace: bytes, layer_bytes: Sequence[int], space: Space) -> PageStore:
    rate = space.read_bytes_per_s
    store = KeyedStore(values, namespace=namespace, layer_bytes=layer_bytes, read_bytes_per_s=rate)
    # As with the native store: it reads only what its own lookup has found.
    return cast(PageStore, store)


def _look_mooncake(location: StoreLocation) -> str:
    options = MooncakeOptions.parse(location.options)
    load_library()
    host = own_host(Address.parse(location.host))
    return f"its library loads, the master answers; this machine would be {options.host or host}"


def _look_nixl_posix(location: StoreLocation) -> str:
    for path in map(Path, location.paths):
        look_at_folder(path, FLAG)
        look_at_folder(path / FOLDER, FLAG)
    new_agent("banyan-doctor")
    return "NIXL has its POSIX plugin"


MOONCAKE = Backend(_open_mooncake, _look_mooncake)
NIXL_POSIX = Backend(_open_nixl_posix, _look_nixl_posix)
