# SPDX-License-Identifier: Apache-2.0
"""What Banyan cannot work with, decided before a server starts: pure, one line for each, with the way out.

The plugin fills ``ServerFacts`` from SGLang's resolved arguments; ``banyan doctor`` prints the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from banyan import SGLANG_VERSION

MAX_RANKS = 64
"""One pin bit for each rank of a node in a 64-bit word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the decision depends on. Defaults are a server that can share."""

    sglang_version: str = SGLANG_VERSION
    device: str = "cpu"
    dp_size: int = 2
    pp_size: int = 1
    num_nodes: int = 1
    page_size: int = 16
    tokenizer_worker_num: int = 1
    disable_radix_cache: bool = False
    radix_cache_backend: str | None = None
    enable_hierarchical_cache: bool = False
    hicache_storage_backend: str | None = None
    enable_lmcache: bool = False
    enable_flexkv: bool = False
    external_linker_backend: str | None = None
    enable_unified_memory: bool = False
    enable_memory_saver: bool = False
    expandable_segments: bool = False
    sizes_pool_after_capture: bool = False
    has_arena: bool = False
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    kv_cache_dtype: str = "auto"
    rust_server: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    applies: Callable[[ServerFacts], bool]
    line: Callable[[ServerFacts], str]


_RULES = (
    _Rule(
        lambda f: f.sglang_version != SGLANG_VERSION,
        lambda f: (
            f"sglang {f.sglang_version} is installed, Banyan works on {SGLANG_VERSION} only: "
            f"install sglang=={SGLANG_VERSION} or start without --enable-banyan"
        ),
    ),
    _Rule(
        lambda f: f.device not in ("cpu", "cuda"),
        lambda f: (
            f"--device {f.device}: pools on this device are not shared: "
            "use --banyan-share off or start without --enable-banyan"
        ),
    ),
    _Rule(
        lambda f: f.device == "cuda" and f.expandable_segments and not f.has_arena,
        lambda f: (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: such memory has no CUDA IPC handle: unset it, "
            "or let pages go through the host arena (--banyan-host-gb)"
        ),
    ),
    _Rule(
        lambda f: f.device == "cuda" and f.sizes_pool_after_capture,
        lambda f: (
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: the pool grows after Banyan has told the other ranks where it lies: "
            "unset it"
        ),
    ),
    _Rule(
        lambda f: f.enable_memory_saver,
        lambda f: (
            "--enable-memory-saver: a pool that is released while peers read it cannot be shared: "
            "start without --enable-memory-saver"
        ),
    ),
    _Rule(
        lambda f: f.dp_size > MAX_RANKS,
        lambda f: f"--dp-size {f.dp_size}: at most {MAX_RANKS} ranks share one node: use --dp-size {MAX_RANKS} or less",
    ),
    _Rule(
        lambda f: f.pp_size > 1,
        lambda f: (
            f"--pp-size {f.pp_size}: pipeline stages may disagree about a hit: use --pp-size 1 "
            "(tensor parallelism within a rank is fine)"
        ),
    ),
    _Rule(
        lambda f: f.num_nodes > 1,
        lambda f: f"--nnodes {f.num_nodes}: ranks share within one node: start one server on each node with --nnodes 1",
    ),
    _Rule(
        lambda f: f.page_size == 1,
        lambda f: "--page-size 1: the unit of sharing is a page of several tokens: use --page-size 16, 32 or 64",
    ),
    _Rule(
        lambda f: f.tokenizer_worker_num > 1,
        lambda f: (
            f"--tokenizer-worker-num {f.tokenizer_worker_num}: SGLang loads no plugin in its extra workers: "
            "use --tokenizer-worker-num 1"
        ),
    ),
    _Rule(
        lambda f: f.rust_server,
        lambda f: "SGLANG_RUST_SERVER: the Rust server bypasses the dispatcher that Banyan hooks: unset it",
    ),
    _Rule(
        lambda f: f.disable_radix_cache,
        lambda f: "--disable-radix-cache: without a radix cache there is no prefix to share: drop that flag",
    ),
    _Rule(
        lambda f: f.radix_cache_backend is not None,
        lambda f: (
            f"--radix-cache-backend {f.radix_cache_backend}: Banyan works on SGLang's own radix cache: drop that flag"
        ),
    ),
    _Rule(
        lambda f: f.enable_hierarchical_cache or f.hicache_storage_backend is not None,
        lambda f: (
            "--enable-hierarchical-cache / --hicache-storage-backend: HiCache and Banyan would both own the tail "
            "of a prefix: use one of them"
        ),
    ),
    _Rule(
        lambda f: f.enable_lmcache,
        lambda f: "--enable-lmcache: LMCache and Banyan would both own the tail of a prefix: use one of them",
    ),
    _Rule(
        lambda f: f.enable_flexkv,
        lambda f: "--enable-flexkv: FlexKV and Banyan would both own the tail of a prefix: use one of them",
    ),
    _Rule(
        lambda f: f.external_linker_backend is not None,
        lambda f: (
            f"--unified-cache-external-linker-backend {f.external_linker_backend}: SGLang takes one linker, "
            "and Banyan is one: drop that flag"
        ),
    ),
    _Rule(
        lambda f: f.enable_unified_memory,
        lambda f: "--enable-unified-memory: its pools are not page arrays that a peer could read: drop that flag",
    ),
    _Rule(
        lambda f: f.speculative_algorithm is not None,
        lambda f: (
            f"--speculative-algorithm {f.speculative_algorithm}: the draft model's KV is not shared yet: "
            "drop that flag or use --banyan-share off"
        ),
    ),
    _Rule(
        lambda f: f.disaggregation_mode != "null",
        lambda f: (
            f"--disaggregation-mode {f.disaggregation_mode}: prefill/decode pairs are not supported yet: "
            "drop that flag or use --banyan-share off"
        ),
    ),
    _Rule(
        lambda f: f.kv_cache_dtype.startswith(("fp4", "mxfp")),
        lambda f: (
            f"--kv-cache-dtype {f.kv_cache_dtype}: its pools keep scales apart from the pages: use auto, bf16 or fp8"
        ),
    ),
)


def refusals(facts: ServerFacts) -> list[str]:
    """One line for each reason why sharing cannot start; empty when it can."""
    return [rule.line(facts) for rule in _RULES if rule.applies(facts)]


def pool_refusal(*, pool_class: str, supported: tuple[str, ...]) -> str:
    """The line for a model whose KV pool is of a class that Banyan does not know."""
    return (
        f"this model's KV pool is a {pool_class}; Banyan shares {', '.join(supported)}: "
        "use --banyan-share off or start without --enable-banyan"
    )


def memory_refusal(*, need_bytes: int, available_bytes: int) -> str | None:
    """The line for a pool that does not fit into memory, or None when it fits."""
    if need_bytes <= available_bytes:
        return None
    gib = 1 << 30
    return (
        f"the KV pool of this rank needs {need_bytes / gib:.2f} GiB of shared memory and "
        f"{available_bytes / gib:.2f} GiB are free: lower --max-total-tokens or --dp-size"
    )


def arena_refusal(*, need_bytes: int, frame_bytes: int, available_bytes: int) -> str | None:
    """The line for a host arena that holds no page or does not fit into memory, or None when it is well."""
    gib = 1 << 30
    if need_bytes < frame_bytes:
        return (
            f"--banyan-host-gb: a rank's part of {need_bytes / gib:.3f} GiB does not hold one page of "
            f"{frame_bytes} bytes: raise it"
        )
    if need_bytes > available_bytes:
        return (
            f"--banyan-host-gb: a rank's part needs {need_bytes / gib:.2f} GiB of shared memory and "
            f"{available_bytes / gib:.2f} GiB are free: lower it"
        )
    return None


def quota_refusal(*, quota_ms: float | None, chunked_prefill_size: int | None) -> str | None:
    """The line for a compute quota on a server that does not cut prefills, or None. None as size: SGLang chooses."""
    if quota_ms is None or chunked_prefill_size is None or chunked_prefill_size > 0:
        return None
    return (
        f"--banyan-prefill-quota-ms with --chunked-prefill-size {chunked_prefill_size}: a prefill that is not cut into "
        "chunks cannot be limited: drop one of the two"
    )
