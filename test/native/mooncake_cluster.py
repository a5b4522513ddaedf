# SPDX-License-Identifier: Apache-2.0
"""A small Mooncake store for tests, and a client that is not Banyan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark.mooncake import HOST, Mooncake

LENT_BYTES = 16 << 20
CLIENT_TTL_S = 2


def start(logs: Path) -> Mooncake:
    """With short leases: a page that was read can be removed a second later."""
    return Mooncake(logs, lent_bytes=LENT_BYTES, ttl_s=CLIENT_TTL_S, flags=("--default_kv_lease_ttl=1s",))


def client(cluster: Mooncake) -> Any:
    """A client of Mooncake's own, that lends nothing."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(HOST, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", cluster.host) == 0
    return store
