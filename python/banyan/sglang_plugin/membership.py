# SPDX-License-Identifier: Apache-2.0
"""This rank's places on its node: its pool's shelf, its part of the host arena, its door to the store.

Invariants
  1. All places carry one namespace: that of the weights the rank computes with.
  2. A place is left before it is taken again: a rank has one shelf in each seat and one reader bit for each view.

States: outside -> ``join`` -> joined -> ``leave_tier``, ``leave`` -> outside -> ``rejoin`` (other weights) -> joined ->
``close_tier``, ``close``. Scheduler thread only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from banyan import _native
from banyan.arena.prefetch import Prefetch
from banyan.config import Config
from banyan.layout import BlockGeometry, Namespace
from banyan.ports import OwnShelf, Source
from banyan.sglang_plugin import arena_memory
from banyan.sglang_plugin.pool import SharedMHAPool, SharedMLAPool
from banyan.sglang_plugin.pool_access import HostAccess, PoolAccess
from banyan.sglang_plugin.store_access import make_admission, open_store, weights_digest
from banyan.sglang_plugin.tiers import HostTier, Seats, withdraw
from banyan.telemetry import Counters

Places = tuple[OwnShelf, Source, Prefetch | None]


class Membership:
    """One rank among the ranks of its node. ``tier`` and ``store`` are None where the flags name none."""

    def __init__(
        self,
        *,
        server_args: Any,
        config: Config,
        carried: Mapping[str, Any],
        pool: Any,
        page_tokens: int,
        forward_stream: Any,
        record_ready: Callable[[], list[Any]],
        counters: Counters,
    ) -> None:
        self._server_args = server_args
        self._config = config
        self._server = carried["server"]
        self._pool = pool
        self._page_tokens = page_tokens
        self._counters = counters
        self._weights_epoch = 0
        self._weights_sha256 = weights_digest(server_args) if config.store or config.keep_host_arena else ""
        self.seats = Seats(
            server_args.dp_size, server_args.tp_size, get_parallel().dp_rank or 0, get_parallel().tp_rank
        )
        self.block = BlockGeometry.of_pool(pool.banyan_geometry)
        self.tier: HostTier | None = None
        self.store: _native.Store | None = None
        self._roster = _native.Roster.open(carried["roster"])
        self._arena = self._open_arena() if config.host_bytes else None
        self.access = self._open_access(forward_stream, record_ready)

    def _open_arena(self) -> arena_memory.Arena:
        num_bytes, folder = self._config.host_bytes // self.seats.num_shards, self._config.keep_host_arena
        if not folder:
            return arena_memory.allocate(num_bytes, self.block)
        return arena_memory.keep(
            Path(folder),
            self.seats.own,
            num_parts=self.seats.num_shards,
            num_bytes=num_bytes,
            block=self.block,
            namespace=self._namespace().digest(),
        )

    def _open_access(self, forward_stream: Any, record_ready: Callable[[], list[Any]]) -> PoolAccess:
        if isinstance(self._pool, SharedMHAPool | SharedMLAPool):
            return HostAccess(self._pool, self._page_tokens)
        # Imported here: it loads Triton and the driver.
        from banyan.sglang_plugin.device_access import DeviceAccess

        return DeviceAccess(
            pool=self._pool,
            page_tokens=self._page_tokens,
            config=self._config,
            num_slots=2 * self.seats.num_shards,
            forward_stream=forward_stream,
            record_ready=record_ready,
            arena=self._arena.memory if self._arena is not None else None,
        )

    def sources(self) -> list[int]:
        """The seats that this rank takes pages from, the preferred first."""
        pools = self.seats.peers if self._config.fetches and self.access.shares_pool else ()
        return [*pools, *(self.seats.arenas if self._arena is not None else ())]

    def join(self) -> Places:
        """Take the places, under the namespace of the present weights."""
        namespace = self._namespace().digest()
        self._shelf, self._peers = self.access.join(self._roster, self.seats, namespace)
        if self._config.store and self.store is None:
            self.store = open_store(
                self._config, namespace=namespace, block=self.block, num_shards=self.seats.num_shards
            )
        elif self.store is not None:
            self.store.invalidate(namespace)
        if self._arena is None:
            return self._shelf, self._peers, None
        self.tier = HostTier(
            roster=self._roster,
            seats=self.seats,
            namespace=namespace,
            arena=self._arena,
            view=self.access.arena_view(self._roster, self.seats, namespace, self.block, self._arena.memory),
            store=self.store,
            admission=make_admission(self._config, num_shards=self.seats.num_shards),
            layers_per_read=self._config.store_layers_per_read,
            counters=self._counters,
        )
        return self._shelf, self._peers, self.tier.prefetch if self.access.follows_reads else None

    def rejoin(self) -> Places:
        """Take the places again, under the namespace of weights that have just changed."""
        self._weights_epoch += 1
        return self.join()

    def empty(self) -> None:
        """Forget every page below the pool, in the store those that this rank has written."""
        if self.tier is not None:
            self.tier.reset()
        if self.store is not None:
            self.store.evict(sys.maxsize)

    def leave_tier(self) -> None:
        """Leave the arena: nothing of it reads the pool any more, and no peer reads it.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        if self.tier is not None:
            self.tier.leave()
            self.tier = None

    def close_tier(self) -> None:
        """As ``leave_tier``, for good: nobody is waited for, and what is kept stays."""
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def leave(self) -> None:
        """Withdraw the pool's pages, wait until no peer reads one, and leave.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self.access.leave()
        withdraw(self._shelf)
        del self._shelf, self._peers

    def close(self) -> None:
        """Leave for good; what the store had begun to write is finished."""
        if self.store is not None:
            self.store.close()
        self._shelf.close()

    def state(self) -> dict[str, Any]:
        """This rank's places, for ``/server_info``."""
        return {
            "dp_rank": self.seats.dp_rank,
            "namespace": self._namespace().digest().hex()[:16],
            "num_published_pages": self._shelf.num_published,
            "num_quarantined_pages": self._shelf.num_quarantined,
            "peers": [member for member in self._roster.members() if member["slot"] in self.seats.peers],
            **(self.tier.state() if self.tier is not None else {}),
            **({"store": self.store.stats()} if self.store is not None else {}),
        }

    def _namespace(self) -> Namespace:
        args, pool = self._server_args, self._pool
        return Namespace(
            # Equal weights are equal whatever their folder is called.
            model="" if self._weights_sha256 else args.model_path,
            revision="" if self._weights_sha256 else args.revision or "",
            weight_version=str(args.weight_version),
            weights_sha256=self._weights_sha256,
            weights_epoch=self._weights_epoch,
            server=self._server if self._weights_epoch else "",
            model_config_sha256=_config_digest(args),
            kv_dtype=str(pool.dtype),
            page_tokens=self._page_tokens,
            first_layer=pool.start_layer,
            num_layers=pool.layer_num,
            page_bytes_by_layer=pool.banyan_geometry.shape_key(),
            pool_layout=f"{type(pool).__name__}/{getattr(pool, 'kv_cache_layout', 'latent')}",
            tp_size=args.tp_size,
            tp_rank=get_parallel().tp_rank,
        )


def _config_digest(server_args: Any) -> str:
    """Digest of what changes a model's KV beside its weights: the overrides and the quantisation asked for."""
    asked = [server_args.json_model_override_args, server_args.dtype, server_args.quantization]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
