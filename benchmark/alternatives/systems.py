# SPDX-License-Identifier: Apache-2.0
"""What is compared: each system as the servers that it consists of, all within one budget. Pure.

Every system has two ranks of one compute thread each, the same pools and pages, and runs on the same CPU engine: the
attention and the dispatcher of `--enable-banyan-cpu-engine`, which Banyan has as well. One row is stock SGLang as it is
shipped, without it. A tier that a system does not have is not made up for: stock SGLang and its router have pools
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmark.router_failover import server_spec as routed_spec
from benchmark.servers import ServerSpec, Share, cpu_env, free_port

NUM_RANKS = 2
PAGE_TOKENS = 16
CONTEXT_TOKENS = 4096
USUAL_DRAM_TOKENS = 40_000
"""Beside the pools, unless another size is asked for (`--dram-tokens`)."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
GIB = 2**30

NO_USAGE_REPORTS = ("LMCACHE_TRACK_USAGE", "false")
"""LMCache tells its makers of every start, unless this says otherwise."""

AS_STOCK = ("--banyan-policy", "sglang")
"""Ranks take turns, as those of stock SGLang, HiCache and LMCache do."""

Front = Literal["none", "cache_aware", "banyan"]
"""Who places requests in front of several servers: nobody, SGLang's router, or `banyan route`."""


@dataclass(frozen=True)
class Budget:
    """What a system may hold, all its ranks together. `token_bytes`: KV of one token, all layers, in `dtype`."""

    pool_tokens: int
    dram_tokens: int
    disk_bytes: int
    token_bytes: int
    dtype: str

    def __post_init__(self) -> None:
        if self.pool_tokens < NUM_RANKS * CONTEXT_TOKENS:
            raise ValueError(
                f"--pool-tokens {self.pool_tokens}: each of {NUM_RANKS} ranks has to hold a request of "
                f"{CONTEXT_TOKENS} tokens: at least {NUM_RANKS * CONTEXT_TOKENS}"
            )

    @property
    def dram_gib(self) -> float:
        return self.dram_tokens * self.token_bytes / GIB


@dataclass(frozen=True)
class LMCacheServer:
    """LMCache's own process, which holds its DRAM for all ranks. `config`: the file that tells SGLang its port."""

    port: int
    config: Path
    dram_gib: float


@dataclass(frozen=True)
class System:
    """One way to serve. `disk`: the folder that outlives its servers, where it has one; `flush_empties_disk`: emptying
    the caches removes what is there, too."""

    name: str
    title: str
    specs: tuple[ServerSpec, ...]
    front: Front = "none"
    disk: Path | None = None
    flush_empties_disk: bool = False
    lmcache: LMCacheServer | None = None


def token_bytes_of(config: Mapping[str, Any], dtype: str) -> int:
    """KV bytes of one token, from a checkpoint's config.json of a model with plain attention."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * DTYPE_BYTES[dtype])


def systems_of(budget: Budget, disk: Path, hicache_path: str) -> dict[str, System]:
    """Every system by its name. Below `disk` each has a folder of its own; `hicache_path` is the PYTHONPATH on which
    HiCache's server finds the plugin that lets it run without a GPU."""
    made = (
        System("as_shipped", "stock SGLang without the CPU engine, dp 2", (_one("as_shipped", budget, "stock"),)),
        System("stock", "stock SGLang, dp 2", (_one("stock", budget, "engine"),)),
        System("stock_again", "the same once more", (_one("stock_again", budget, "engine"),)),
        System("router", "SGLang's router, cache_aware", _two("router", budget, _plain), "cache_aware"),
        _router_over_hicache("router_hicache", "SGLang's router, HiCache without files", budget, hicache_path),
        _router_over_hicache(
            "router_hicache_back",
            "SGLang's router, HiCache that writes back",
            budget,
            hicache_path,
            *("--hicache-write-policy", "write_back"),
        ),
        System(
            "hicache_dram",
            "HiCache without files",
            (_with_hicache(_one("hicache_dram", budget, "engine"), budget, hicache_path),),
        ),
        _hicache(budget, disk / "hicache", hicache_path),
        _over_lmcache(
            "lmcache", "LMCache, one server for both ranks", (_one("lmcache", budget, "engine"),), budget, disk
        ),
        _over_lmcache(
            "router_lmcache",
            "SGLang's router, LMCache",
            _two("router_lmcache", budget, _plain),
            budget,
            disk,
            front="cache_aware",
        ),
        System("banyan", "Banyan, dp 2", (_one("banyan", budget, "on", *_arena(budget, 1)),)),
        System(
            "banyan_even",
            "Banyan, placed as stock",
            (_one("banyan_even", budget, "on", *_arena(budget, 1), *AS_STOCK),),
        ),
        _with_store(budget, disk / "banyan_store"),
        System("banyan_route", "banyan route, two servers", _two("banyan_route", budget, _routed), "banyan"),
    )
    return {system.name: system for system in made}


DEFAULT_SYSTEMS = (
    *("as_shipped", "stock", "stock_again", "router", "router_hicache", "hicache_dram", "hicache", "lmcache"),
    *("banyan", "banyan_even", "banyan_store", "banyan_route"),
)


def _args(budget: Budget) -> tuple[str, ...]:
    pool_tokens = budget.pool_tokens // NUM_RANKS
    return (
        *("--device", "cpu", "--max-total-tokens", str(pool_tokens), "--context-length", str(CONTEXT_TOKENS)),
        *("--dtype", budget.dtype, "--page-size", str(PAGE_TOKENS), "--sleep-on-idle", "--enable-metrics"),
    )


def _one(label: str, budget: Budget, share: Share, *flags: str) -> ServerSpec:
    args = (*_args(budget), *flags)
    return ServerSpec(label, NUM_RANKS, share, args, cpu_env(dp=NUM_RANKS))


def _two(label: str, budget: Budget, make: Callable[[str, int, Budget], ServerSpec]) -> tuple[ServerSpec, ...]:
    return tuple(make(f"{label}-{core}", core, budget) for core in range(NUM_RANKS))


def _plain(label: str, core: int, budget: Budget) -> ServerSpec:
    return ServerSpec(label, 1, "engine", _args(budget), cpu_env(dp=1, first_core=core))


def _routed(label: str, core: int, budget: Budget) -> ServerSpec:
    args = (*_args(budget), *_arena(budget, NUM_RANKS))
    return replace(routed_spec(label, core, args), share="on")


def _arena(budget: Budget, num_servers: int) -> tuple[str, ...]:
    return "--banyan-host-gb", f"{budget.dram_gib / num_servers:.6f}"


def _hicache(budget: Budget, disk: Path, path: str) -> System:
    """HiCache with its file backend in one folder for both ranks. Prefixes of one page are prefetched: prompts are
    scaled down here, so the default of 256 tokens would shut out most of them."""
    extra = {"max_size": budget.disk_bytes // NUM_RANKS, "prefetch_threshold": PAGE_TOKENS}
    files = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", json.dumps(extra))
    spec = _with_hicache(_one("hicache", budget, "engine", *files), budget, path)
    env = (*spec.env, ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(disk)))
    return System("hicache", "HiCache, files shared by both ranks", (replace(spec, env=env),), disk=disk)


def _router_over_hicache(name: str, title: str, budget: Budget, path: str, *flags: str) -> System:
    specs = (_with_hicache(spec, budget, path, *flags) for spec in _two(name, budget, _plain))
    return System(name, title, tuple(specs), "cache_aware")


def _with_hicache(spec: ServerSpec, budget: Budget, path: str, *more_flags: str) -> ServerSpec:
    """The server with HiCache, whose DRAM each rank has for itself. Other than SGLang's defaults are two settings:
    transfers go by `direct` and host memory is laid out as `page_first_direct`. The defaults, `kernel` and
    `page_first`, need kernels of a GPU, which the stand-in for `sgl_kernel` does not have."""
    flags = (
        *more_flags,
        *("--enable-hierarchical-cache", "--hicache-ratio", f"{budget.dram_tokens / budget.pool_tokens:.4f}"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    )
    return replace(spec, args=(*spec.args, *flags), env=(*spec.env, ("PYTHONPATH", path)))


def _over_lmcache(
    name: str, title: str, specs: tuple[ServerSpec, ...], budget: Budget, disk: Path, front: Front = "none"
) -> System:
    """LMCache's server with all of the DRAM, shared by all ranks; chunks of one page, as SGLang's linker has them."""
    config = disk / f"{name}.yaml"
    flags = ("--enable-lmcache", "--lmcache-config-file", str(config))
    made = (replace(spec, args=(*spec.args, *flags), env=(*spec.env, NO_USAGE_REPORTS)) for spec in specs)
    return System(name, title, tuple(made), front, lmcache=LMCacheServer(free_port(), config, budget.dram_gib))


def _with_store(budget: Budget, disk: Path) -> System:
    """Pages are written when they are first seen, as HiCache does."""
    flags = ("--banyan-store", str(disk), "--banyan-store-admit", "first")
    size = ("--banyan-store-gb", f"{budget.disk_bytes / GIB:.6f}")
    spec = _one("banyan_store", budget, "on", *_arena(budget, 1), *flags, *size)
    return System("banyan_store", "Banyan with a store, dp 2", (spec,), disk=disk, flush_empties_disk=True)
