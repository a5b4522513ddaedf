# SPDX-License-Identifier: Apache-2.0
"""What Banyan cannot work with, decided before a server starts: pure, one line for each, with the way out.

The plugin fills ``ServerFacts`` from SGLang's resolved arguments; ``banyan doctor`` prints the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from banyan import SGLANG_VERSION
from banyan.refusals.hicache import in_banyans_words
from banyan.refusals.rule import Rule, lines_of
from banyan.refusals.speculation import DraftFacts, draft_refusals

REFUSED = "banyan: refused: "
"""Before each line that says why."""

MAX_SLOTS = 64
"""One pin bit for each reader of a node in a 64-bit word."""

HAND_OVERS = ("nixl", "mooncake", "mooncake_tcp")
"""Engines of pairs, in SGLang's words for ``--disaggregation-transfer-backend``."""

NOT_OF_FILES = ("dummy", "remote", "remote_instance", "rdma", "private", "npcache", "presharded", "expert_pack")
"""Values of ``--load-format`` with which a rank's weights are not, or need not be, those of the files that the model's
path names: of nobody's, of another server's, or of copies that were made of such files once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the decision depends on. Defaults are a server that can share."""

    sglang_version: str = SGLANG_VERSION
    device: str = "cpu"
    num_member_slots: int = 2
    pp_size: int = 1
    page_size: int = 16
    disable_radix_cache: bool = False
    radix_cache_backend: str | None = None
    enable_hierarchical_cache: bool = False
    hicache_storage_backend: str | None = None
    hicache_size: int = 0
    enable_lmcache: bool = False
    enable_flexkv: bool = False
    external_linker_backend: str | None = None
    enable_unified_memory: bool = False
    enable_memory_saver: bool = False
    expandable_segments: bool = False
    sizes_pool_after_capture: bool = False
    has_arena: bool = False
    draft: DraftFacts = field(default_factory=DraftFacts)
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = "nixl"
    disaggregation_decode_allocation_policy: str = "early"
    disaggregation_decode_retraction_backup: str | None = None
    disaggregation_decode_host_receive_threshold: float = 1.0
    disaggregation_decode_enable_offload_kvcache: bool = False
    enable_pd_role_switch: bool = False
    sends_early: bool = False
    enable_hisparse: bool = False
    num_ranks: int = 2
    load_balance_method: str = "auto"
    policy: str = "sglang"
    store_admit: str = "first"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    speculative_draft_load_format: str | None = None
    weight_cache_mode: str = "off"
    modelopt_checkpoint_restore_path: str | None = None
    kt_weight_path: str | None = None
    knows_weights: bool = False
    rust_server: bool = False
    rust_servicer: bool = False

    @property
    def num_slots(self) -> int:
        """Places in the rank table: a second one for each process's part of a host arena."""
        return self.num_member_slots * (2 if self.has_arena else 1)


def is_release(sglang_version: str) -> bool:
    """Whether Banyan works on it. What stands behind a plus says how the same release was built (``+cu130``)."""
    return sglang_version.partition("+")[0] == SGLANG_VERSION


def release_refusal(sglang_version: str) -> str:
    """The line for another release."""
    return (
        f"sglang {sglang_version} is installed, Banyan works on {SGLANG_VERSION} only: "
        f"install sglang=={SGLANG_VERSION} or start without --enable-banyan"
    )


def _of_other_weights(name: str, applies: Callable[[Any], bool], way_out: str = "drop that flag") -> Rule[ServerFacts]:
    """Where the flag of this name applies, weights, or a part of them, are not those of the files that the model's path
    names."""
    flag = f"--{name.replace('_', '-')}"
    return Rule(
        lambda f: f.knows_weights and applies(getattr(f, name)),
        lambda f: (
            f"{flag} {getattr(f, name)} with --banyan-store, --banyan-keep-host-arena, --banyan-listen or "
            "--banyan-peers: pages must know their weights, and these are not those of the model's files: "
            f"{way_out}, or drop those flags of Banyan's"
        ),
    )


_RULES: tuple[Rule[ServerFacts], ...] = (
    Rule(
        lambda f: not is_release(f.sglang_version),
        lambda f: release_refusal(f.sglang_version),
    ),
    Rule(
        lambda f: f.device not in ("cpu", "cuda"),
        lambda f: (
            f"--device {f.device}: pools on this device are not shared: "
            "use --banyan-share off or start without --enable-banyan"
        ),
    ),
    Rule(
        lambda f: f.device == "cuda" and f.expandable_segments and not f.has_arena,
        lambda f: (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: such memory has no CUDA IPC handle: unset it, "
            "or let pages go through the host arena (--banyan-host-gb)"
        ),
    ),
    Rule(
        lambda f: f.device == "cuda" and f.sizes_pool_after_capture,
        lambda f: (
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: the pool grows after Banyan has told the other ranks where it lies: "
            "set it to 0; SGLang sets it for some models where it is unset"
        ),
    ),
    Rule(
        lambda f: f.device == "cuda" and f.enable_memory_saver and not f.has_arena,
        lambda f: (
            "--enable-memory-saver: memory that can be given back has no CUDA IPC handle: let pages go through the "
            "host arena (--banyan-host-gb), or start without --enable-memory-saver"
        ),
    ),
    Rule(
        lambda f: f.num_slots > MAX_SLOTS,
        lambda f: (
            f"--dp-size, --tp-size: {f.num_member_slots} processes {'and --banyan-host-gb ' if f.has_arena else ''}"
            f"take {f.num_slots} member slots, a node has {MAX_SLOTS}: use fewer"
            f"{' or no host arena' if f.has_arena else ''}"
        ),
    ),
    Rule(
        lambda f: f.pp_size > 1,
        lambda f: (
            f"--pp-size {f.pp_size}: pipeline stages may disagree about a hit: use --pp-size 1 "
            "(tensor parallelism within a rank is fine)"
        ),
    ),
    Rule(
        lambda f: f.page_size == 1,
        lambda f: "--page-size 1: the unit of sharing is a page of several tokens: use --page-size 16, 32 or 64",
    ),
    Rule(
        lambda f: f.rust_server,
        lambda f: "SGLANG_RUST_SERVER: the Rust server bypasses the dispatcher that Banyan hooks: unset it",
    ),
    Rule(
        lambda f: f.rust_servicer,
        lambda f: (
            "--servicer-impl rust (SMG_SGLANG_SERVICER_IMPL): it bypasses the dispatcher that Banyan hooks: "
            "use --servicer-impl python"
        ),
    ),
    Rule(
        lambda f: f.disable_radix_cache,
        lambda f: "--disable-radix-cache: without a radix cache there is no prefix to share: drop that flag",
    ),
    Rule(
        lambda f: f.radix_cache_backend is not None,
        lambda f: (
            f"--radix-cache-backend {f.radix_cache_backend}: Banyan works on SGLang's own radix cache: drop that flag"
        ),
    ),
    Rule(
        lambda f: f.enable_hierarchical_cache or f.hicache_storage_backend is not None,
        lambda f: (
            "--enable-hierarchical-cache / --hicache-storage-backend: HiCache and Banyan would both own the tail "
            "of a prefix: use one of them; in place of HiCache's flags Banyan has "
            + in_banyans_words(
                size_gb=f.hicache_size, num_processes=f.num_member_slots, backend=f.hicache_storage_backend
            )
        ),
    ),
    Rule(
        lambda f: f.enable_lmcache,
        lambda f: "--enable-lmcache: LMCache and Banyan would both own the tail of a prefix: use one of them",
    ),
    Rule(
        lambda f: f.enable_flexkv,
        lambda f: "--enable-flexkv: FlexKV and Banyan would both own the tail of a prefix: use one of them",
    ),
    Rule(
        lambda f: f.external_linker_backend is not None,
        lambda f: (
            f"--unified-cache-external-linker-backend {f.external_linker_backend}: SGLang takes one linker, "
            "and Banyan is one: drop that flag"
        ),
    ),
    Rule(
        lambda f: f.enable_unified_memory,
        lambda f: "--enable-unified-memory: its pools are not page arrays that a peer could read: drop that flag",
    ),
    _of_other_weights("load_format", NOT_OF_FILES.__contains__, "use --load-format auto"),
    # A draft's pages go with the model's.
    _of_other_weights("speculative_draft_load_format", NOT_OF_FILES.__contains__),
    # Of a process that has read them whenever it was started.
    _of_other_weights("weight_cache_mode", lambda mode: mode != "off"),
    _of_other_weights("modelopt_checkpoint_restore_path", bool),
    _of_other_weights("kt_weight_path", bool),
    Rule(
        lambda f: f.kv_cache_dtype.startswith(("fp4", "mxfp", "nvfp4")),
        lambda f: (
            f"--kv-cache-dtype {f.kv_cache_dtype}: its pools keep scales apart from the pages: use auto, bf16 or fp8"
        ),
    ),
)


_PAIR_RULES: tuple[Rule[ServerFacts], ...] = (
    Rule(
        lambda f: f.disaggregation_transfer_backend not in HAND_OVERS,
        lambda f: (
            f"--disaggregation-transfer-backend {f.disaggregation_transfer_backend}: only with nixl or mooncake is a "
            "decode server told at once when its prefill is given up: use --disaggregation-transfer-backend nixl"
        ),
    ),
    Rule(
        lambda f: f.enable_pd_role_switch,
        lambda f: (
            "--enable-pd-role-switch: what a server reads and writes is decided by its first role: drop that flag"
        ),
    ),
    Rule(
        lambda f: f.store_admit == "second",
        lambda f: (
            f"--banyan-store-admit second with --disaggregation-mode {f.disaggregation_mode}: an answer is seen "
            "once where it is generated, and found only behind its prompt: use first"
        ),
    ),
)

_PREFILL_RULES: tuple[Rule[ServerFacts], ...] = (
    Rule(
        lambda f: f.sends_early and (f.device == "cpu" or f.disaggregation_transfer_backend == "nixl"),
        lambda f: (
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX: its senders do not wait for the forward that still writes "
            "these pages: unset it"
        ),
    ),
    Rule(
        lambda f: f.num_ranks > 1 and f.policy != "sglang" and f.load_balance_method == "follow_bootstrap_room",
        lambda f: (
            f"--load-balance-method follow_bootstrap_room with --banyan-policy {f.policy}: both would choose the rank: "
            "drop one of the two"
        ),
    ),
)

_DECODE_RULES: tuple[Rule[ServerFacts], ...] = (
    Rule(
        lambda f: f.disaggregation_decode_allocation_policy == "prefill_complete",
        lambda f: (
            "--disaggregation-decode-allocation-policy prefill_complete: SGLang takes it only without a radix cache, "
            "in which Banyan keeps answers: use --disaggregation-decode-allocation-policy early on both servers"
        ),
    ),
    Rule(
        lambda f: (
            f.disaggregation_decode_retraction_backup == "host_pool"
            or f.disaggregation_decode_host_receive_threshold < 1
        ),
        lambda f: (
            "--disaggregation-decode-retraction-backup host_pool, --disaggregation-decode-host-receive-threshold: "
            "SGLang's host pool takes the place of Banyan: drop those flags"
        ),
    ),
    Rule(
        lambda f: f.disaggregation_decode_enable_offload_kvcache,
        lambda f: (
            "--disaggregation-decode-enable-offload-kvcache: HiCache and Banyan would both keep what is generated: "
            "use one of them"
        ),
    ),
    Rule(
        lambda f: f.enable_hisparse,
        lambda f: "--enable-hisparse: decode servers with it have no radix cache to keep answers in: drop that flag",
    ),
)


def refusals(facts: ServerFacts) -> list[str]:
    """One line for each reason why sharing cannot start; empty when it can."""
    rules = list(_RULES)
    if facts.disaggregation_mode != "null":
        rules += _PAIR_RULES
        rules += _PREFILL_RULES if facts.disaggregation_mode == "prefill" else _DECODE_RULES
    return [*lines_of(rules, facts), *draft_refusals(facts.draft)]


def pool_refusal(*, pool_class: str, supported: tuple[str, ...]) -> str:
    """The line for a model whose KV pool is of a class that Banyan does not know."""
    return (
        f"this model's KV pool is a {pool_class}; Banyan shares {', '.join(supported)}: "
        "use --banyan-share off or start without --enable-banyan"
    )


def layout_refusal(*, asked: str, resolved: str) -> str:
    """The line for a server whose processes SGLang has divided in another way than its flags say."""
    return f"the flags say {asked}, SGLang made {resolved} of them: name the sizes yourself, or use --banyan-share off"


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


def secret_refusal(*, path: str, error: object) -> str:
    """The line for a secret that cannot be used."""
    return f"--banyan-secret-file {path}: {error}"


def nixl_refusal(*, carrier: str, way_out: str) -> str:
    """The line for a carrier that is not installed."""
    return f"--banyan-carrier {carrier}: NIXL is not installed: {way_out}, or use --banyan-carrier tcp"


def page_server_slots_refusal(*, num_slots: int, num_shards: int) -> str | None:
    """The line for a node on which no member slot is left for its page servers, or None."""
    if num_slots + num_shards <= MAX_SLOTS:
        return None
    return (
        f"--banyan-listen: the ranks take {num_slots} member slots and the page servers {num_shards}, a node has "
        f"{MAX_SLOTS}: use fewer ranks, or drop that flag"
    )


def spread_rank_refusal(*, num_nodes: int) -> str:
    """The line for a page server, or for borrowing, where a rank has a part of each page on every node."""
    return (
        f"--banyan-listen, --banyan-peers with --nnodes {num_nodes}: a rank of this server lies on several nodes, and "
        "a page server lends whole pages: drop these flags, or choose sizes with which each rank lies on one node"
    )


def arena_room_refusal(*, flag: str, free_bytes: int) -> str:
    """The line for a store, or for other nodes, where the memory that is free gives the arena no room."""
    return (
        f"{flag}: of {free_bytes / (1 << 30):.2f} GiB that are free the host arena would get too little to "
        "hold a prefix: set --banyan-host-gb, or use no store"
    )


def environment_refusal(variable: str) -> str:
    """The line for flags in the environment that turn nothing on."""
    return f"{variable} does not say --enable-banyan: say so, or unset it"


def words_refusal(variable: str, error: object) -> str:
    """The line for flags in the environment that are no words of a command line."""
    return f"{variable}: {error}: close it"


def not_enabled_refusal(given: Sequence[str]) -> str:
    """The line for flags of Banyan's on a command line that does not turn it on."""
    return f"{', '.join(given)}: has no effect without --enable-banyan: pass that as well, or drop it"


def late_refusal(variable: str) -> str:
    """The line for arguments that SGLang had resolved before it loaded its plugins."""
    return (
        f"{variable}: this program had SGLang's arguments resolved before plugins were loaded: call "
        "sglang.srt.plugins.load_plugins() before it builds them, or unset it"
    )
