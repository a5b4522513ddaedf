# SPDX-License-Identifier: Apache-2.0
"""Which pool and which allocator this rank gets: on the host, or on its GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.runtime_context import get_parallel

from banyan.config import Config
from banyan.refusals.start import allocator_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.device_pool import DeviceDSAPool, DeviceMHAPool, DeviceMLAPool
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool, SharedMLAPool
from banyan.sglang_plugin.pools.rank_device import RankDevice

HOST_POOLS: dict[str, type] = {"mha": SharedMHAPool, "mla": SharedMLAPool}
DEVICE_POOLS: dict[str, type] = {"mha": DeviceMHAPool, "mla": DeviceMLAPool, "dsa": DeviceDSAPool}
"""By SGLang's kinds."""
POOLS = (*HOST_POOLS.values(), *DEVICE_POOLS.values())


def around_get_kv_pool_cls(original: Callable[..., Any], platform: Any, *, kind: str) -> type | None:
    chosen = original(platform, kind=kind)
    if not runtime.is_sharing():
        return chosen
    # The first that a scheduler process asks of Banyan.
    parallel = get_parallel()
    runtime.log_as_asked(runtime.config(), "scheduler", dp_rank=parallel.dp_rank or 0, tp_rank=parallel.tp_rank)
    # SGLang asks for kinds that the model does not use; an unknown pool is refused by the linker, when it is built.
    return chosen or (DEVICE_POOLS if runtime.is_on_gpu() else HOST_POOLS).get(kind)


def around_get_paged_allocator_cls(original: Callable[..., Any], platform: Any) -> type | None:
    chosen = original(platform)
    if not runtime.is_sharing():
        return chosen
    if chosen is not None:
        runtime.refuse(allocator_refusal(allocator_class=chosen.__name__))
    return DeviceAllocator if runtime.is_on_gpu() else QuarantiningAllocator


def open_device(config: Config, pools: Sequence[Any]) -> RankDevice | None:
    """What all ``pools`` of a rank share of its GPU; None where they lie on the host."""
    return None if isinstance(pools[0], tuple(HOST_POOLS.values())) else RankDevice(config, pools)
