# SPDX-License-Identifier: Apache-2.0
"""Every knob of Banyan: unit, default, check. The only reader of the environment.

A knob is a command-line flag of the server. The flags travel to SGLang's processes as one frozen ``Config``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SHARE_CHOICES = ("peer", "index", "off")
SGLANG_POLICY = "sglang"
POLICY_CHOICES = (
    SGLANG_POLICY,
    "round_robin",
    "session_sticky",
    "affinity",
    "linear",
    "lmetric",
    "unified",
    "hybrid",
    "dualpath",
)
DEFAULT_POLICY = "lmetric"
AUTO_LOAD_BALANCE = "auto"
"""SGLang's default for ``--load-balance-method``: the user has not chosen one."""
PLAN_CHOICES = ("measured", "move")
DEFAULT_PAGE_TOKENS = 16
ADMIT_CHOICES = ("first", "second")
KEEP_FOLDER = "/dev/shm/banyan"
GIB = 1 << 30
CPU_ATTENTION_BACKEND = "banyan_cpu"
CPU_ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
"""In the words of ONEDNN_MAX_CPU_ISA, oneDNN's own variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user asked for.

    Attributes:
        share: "peer" fetches pages from other ranks; "index" only tells the dispatcher what each rank holds; "off"
            installs the CPU engine's fixes only, the fair baseline.
        min_fetch_tokens: shorter matches are computed. One page by default: copying a page beats computing it.
        prefix_hints: whether the dispatcher looks every prompt up and tells the rank what it saw.
        host_gb: DRAM of the node for pages that have left the pools, in GiB, over all ranks; 0: none.
        keep_host_arena: folder on tmpfs in which the arena outlives the server; empty: it does not.
        store: folders over which the store is striped, in this order; empty: no store.
        store_gb: what all servers on these folders may occupy together, in GiB.
        store_admit: "first" writes every page, "second" those that were seen twice.
        store_write_gb_per_day: what this server may write, in GiB a day, for the drive's endurance; 0: no limit.
        store_read_mb_per_s: each rank reads no faster than this, in 10^6 bytes a second; 0: no limit.
        store_layers_per_read: layers in one submission; 1 streams layer by layer, 0 reads all layers at once.
        policy: who chooses a request's rank: one of ``banyan.routing.POLICIES``, or "sglang" for its own method.
        hot_rank_factor: no request goes to a rank with more than this times the others' mean of ongoing tokens.
        elastic_prefill_tokens: prompts with at least so many new tokens may be computed on an idle rank before their
            session's rank answers them; None: none.
        plan: "measured" moves what is expected to be faster to move; "move" moves whatever is found.
        profile: absolute path of a file that ``banyan profile`` wrote, or None.
        prefill_quota_ms: the time that one prefill forward may take, as predicted by the profile; None: no limit.
        copy_sms: on a GPU, the processors that copies between pools may take. Not measured yet.
        copy_layers_per_launch: on a GPU, the layers that one copy kernel moves. Not measured yet.
    """

    share: str = "peer"
    min_fetch_tokens: int = DEFAULT_PAGE_TOKENS
    prefix_hints: bool = True
    host_gb: float = 0.0
    keep_host_arena: str = ""
    store: tuple[str, ...] = ()
    store_gb: float = 100.0
    store_admit: str = "second"
    store_write_gb_per_day: float = 0.0
    store_read_mb_per_s: float = 0.0
    store_layers_per_read: int = 1
    policy: str = SGLANG_POLICY
    hot_rank_factor: float = 2.0
    elastic_prefill_tokens: int | None = None
    plan: str = "measured"
    profile: str | None = None
    prefill_quota_ms: float | None = None
    copy_sms: int = 16
    copy_layers_per_launch: int = 4

    def __post_init__(self) -> None:
        if self.share not in SHARE_CHOICES:
            raise ValueError(f"--banyan-share {self.share}: choose one of {', '.join(SHARE_CHOICES)}")
        if self.min_fetch_tokens < 1:
            raise ValueError(f"--banyan-min-fetch-tokens {self.min_fetch_tokens}: at least 1 token")
        if not 0 <= self.host_gb < float("inf"):
            raise ValueError(f"--banyan-host-gb {self.host_gb}: a size in GiB, or 0 for no host arena")
        if self.keep_host_arena and not self.host_gb:
            raise ValueError("--banyan-keep-host-arena: there is no arena to keep: set --banyan-host-gb as well")
        if self.store and not self.host_gb:
            raise ValueError("--banyan-store: pages come and go by way of the host arena: set --banyan-host-gb as well")
        if not 0 < self.store_gb < float("inf"):
            raise ValueError(f"--banyan-store-gb {self.store_gb}: a size in GiB")
        if self.store_admit not in ADMIT_CHOICES:
            raise ValueError(f"--banyan-store-admit {self.store_admit}: choose one of {', '.join(ADMIT_CHOICES)}")
        if not 0 <= self.store_write_gb_per_day < float("inf"):
            raise ValueError(f"--banyan-store-write-gb-per-day {self.store_write_gb_per_day}: GiB, or 0 for no limit")
        if not 0 <= self.store_read_mb_per_s < float("inf"):
            raise ValueError(f"--banyan-store-read-mb-per-s {self.store_read_mb_per_s}: a rate, or 0 for no limit")
        if self.store_layers_per_read < 0:
            raise ValueError(f"--banyan-store-layers-per-read {self.store_layers_per_read}: at least 0")
        if self.policy not in POLICY_CHOICES:
            raise ValueError(f"--banyan-policy {self.policy}: choose one of {', '.join(POLICY_CHOICES)}")
        if not self.hot_rank_factor >= 1:
            raise ValueError(f"--banyan-hot-rank-factor {self.hot_rank_factor}: at least 1 (inf: no rank is hot)")
        if self.policy != SGLANG_POLICY and not self.looks_up:
            raise ValueError(
                f"--banyan-policy {self.policy}: there is nothing to look up with --banyan-share off or "
                "--banyan-no-prefix-hints: use --banyan-share index, or --banyan-policy sglang"
            )
        if self.elastic_prefill_tokens is not None and self.elastic_prefill_tokens < 1:
            raise ValueError(f"--banyan-elastic-prefill-tokens {self.elastic_prefill_tokens}: at least 1 token")
        if self.elastic_prefill_tokens is not None and not (self.fetches and self.policy != SGLANG_POLICY):
            raise ValueError(
                "--banyan-elastic-prefill-tokens: the dispatcher sends the request where the KV is fetched: use "
                "--banyan-share peer and a --banyan-policy other than sglang"
            )
        if self.plan not in PLAN_CHOICES:
            raise ValueError(f"--banyan-plan {self.plan}: choose one of {', '.join(PLAN_CHOICES)}")
        if self.prefill_quota_ms is not None and not 0 < self.prefill_quota_ms < float("inf"):
            raise ValueError(f"--banyan-prefill-quota-ms {self.prefill_quota_ms}: above 0")
        if self.prefill_quota_ms is not None and self.profile is None:
            raise ValueError(
                "--banyan-prefill-quota-ms: needs prefill times: write them with `banyan profile` and pass "
                "--banyan-profile PATH"
            )
        if self.copy_sms < 1:
            raise ValueError(f"--banyan-copy-sms {self.copy_sms}: at least 1 processor")
        if self.copy_layers_per_launch < 1:
            raise ValueError(f"--banyan-copy-layers-per-launch {self.copy_layers_per_launch}: at least 1 layer")

    @property
    def shares(self) -> bool:
        """Whether ranks publish what they hold."""
        return self.share != "off"

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena over all ranks."""
        return int(self.host_gb * GIB)

    @property
    def store_bytes(self) -> int:
        return int(self.store_gb * GIB)

    @property
    def store_write_bytes_per_day(self) -> int:
        """What this server may write; 0: no limit."""
        return int(self.store_write_gb_per_day * GIB)

    @property
    def fetches(self) -> bool:
        """Whether ranks copy from each other."""
        return self.share == "peer"

    @property
    def looks_up(self) -> bool:
        """Whether the dispatcher knows what the ranks hold."""
        return self.shares and self.prefix_hints

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        return cls(**values)


DEFAULT = Config()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Banyan's flags to SGLang's parser."""
    group = parser.add_argument_group("banyan", "One prefix cache over all data-parallel ranks.")
    group.add_argument(
        "--enable-banyan",
        action="store_true",
        help="Share cached prefixes between the data-parallel ranks of this node.",
    )
    group.add_argument(
        "--banyan-share",
        choices=SHARE_CHOICES,
        default=DEFAULT.share,
        help="peer: fetch pages from other ranks. index: dispatch by what each rank holds, fetch nothing. "
        "off: no sharing, only the CPU engine's attention and poller.",
    )
    group.add_argument(
        "--banyan-min-fetch-tokens",
        type=int,
        default=DEFAULT.min_fetch_tokens,
        metavar="TOKENS",
        help="Compute, do not fetch, matches shorter than this.",
    )
    _add_tier_flags(group)
    _add_decision_flags(group)
    _add_gpu_flags(group)


def _add_tier_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--banyan-host-gb",
        type=float,
        default=DEFAULT.host_gb,
        metavar="GIB",
        help="Keep pages that leave the pools in this much DRAM, one copy for all ranks of the node. 0: none.",
    )
    group.add_argument(
        "--banyan-keep-host-arena",
        nargs="?",
        const=KEEP_FOLDER,
        default=DEFAULT.keep_host_arena,
        metavar="DIR",
        help="Let that memory outlive the server, in this folder on tmpfs; its next start on this node finds the pages "
        f"again. Without DIR: {KEEP_FOLDER}.",
    )
    group.add_argument(
        "--banyan-store",
        type=lambda text: tuple(path for path in text.split(",") if path),
        default=DEFAULT.store,
        metavar="PATH[,PATH...]",
        help="Keep pages in these folders, across restarts; several servers of the same model may use them at once.",
    )
    group.add_argument(
        "--banyan-store-gb",
        type=float,
        default=DEFAULT.store_gb,
        metavar="GIB",
        help="What the store may occupy, by all its servers together.",
    )
    group.add_argument(
        "--banyan-store-admit",
        choices=ADMIT_CHOICES,
        default=DEFAULT.store_admit,
        help="Write a page when it is seen the first time, or only when it is asked for a second time.",
    )
    group.add_argument(
        "--banyan-store-write-gb-per-day",
        type=float,
        default=DEFAULT.store_write_gb_per_day,
        metavar="GIB",
        help="Write no more than this in a day, for the drive's endurance. 0: no limit.",
    )
    group.add_argument(
        "--banyan-store-read-mb-per-s",
        type=float,
        default=DEFAULT.store_read_mb_per_s,
        metavar="MB",
        help="Each rank reads no faster than this, where others use the drive too. 0: no limit.",
    )
    group.add_argument(
        "--banyan-store-layers-per-read",
        type=int,
        default=DEFAULT.store_layers_per_read,
        metavar="LAYERS",
        help="Layers in one submission: 1 streams layer by layer, 0 reads whole pages before the forward pass.",
    )


def _add_decision_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--banyan-no-prefix-hints",
        action="store_true",
        help="Do not look prompts up in the dispatcher (saves it a hash of every prompt).",
    )
    group.add_argument(
        "--banyan-policy",
        choices=POLICY_CHOICES,
        default=None,
        help=f"Who chooses a request's rank. Default: {DEFAULT_POLICY}; sglang, its own method, where that was asked "
        "for (--load-balance-method) or prompts are not looked up.",
    )
    group.add_argument(
        "--banyan-hot-rank-factor",
        type=float,
        default=DEFAULT.hot_rank_factor,
        metavar="FACTOR",
        help="Send nothing to a rank with more than this times the others' mean of ongoing tokens; inf: never mind.",
    )
    group.add_argument(
        "--banyan-elastic-prefill-tokens",
        type=int,
        metavar="TOKENS",
        help="Let an idle rank compute prompts with at least this many new tokens when their session's rank is busy; "
        "that one fetches the KV and answers. Default: never.",
    )
    group.add_argument(
        "--banyan-plan",
        choices=PLAN_CHOICES,
        default=DEFAULT.plan,
        help="measured: move a prefix where that is expected to be faster than computing it. move: always.",
    )
    group.add_argument(
        "--banyan-profile",
        metavar="PATH",
        help="Prefill times of this model on this machine, written by `banyan profile`.",
    )
    group.add_argument(
        "--banyan-prefill-quota-ms",
        type=float,
        metavar="MS",
        help="Cut prefills so that one forward is predicted to take no longer. Needs --banyan-profile.",
    )


def _add_gpu_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--banyan-copy-sms",
        type=int,
        default=DEFAULT.copy_sms,
        metavar="N",
        help="On a GPU: processors (SMs) that copies between pools may take.",
    )
    group.add_argument(
        "--banyan-copy-layers-per-launch",
        type=int,
        default=DEFAULT.copy_layers_per_launch,
        metavar="LAYERS",
        help="On a GPU: layers that one copy kernel moves. Fewer start earlier, more launch less.",
    )


def take_flags(args: argparse.Namespace) -> Config | None:
    """Remove Banyan's flags from the namespace; None when Banyan was not asked for.

    Raises:
        ValueError: for a value out of range, naming the flag.
    """
    values = {name: vars(args).pop(name) for name in list(vars(args)) if name.startswith("banyan_")}
    if not vars(args).pop("enable_banyan", False):
        return None
    share, prefix_hints = values["banyan_share"], not values["banyan_no_prefix_hints"]
    looks_up = share != "off" and prefix_hints
    leaves_it_open = vars(args).get("load_balance_method", AUTO_LOAD_BALANCE) == AUTO_LOAD_BALANCE
    return Config(
        share=share,
        min_fetch_tokens=values["banyan_min_fetch_tokens"],
        host_gb=values["banyan_host_gb"],
        keep_host_arena=os.path.abspath(values["banyan_keep_host_arena"]) if values["banyan_keep_host_arena"] else "",
        store=values["banyan_store"],
        store_gb=values["banyan_store_gb"],
        store_admit=values["banyan_store_admit"],
        store_write_gb_per_day=values["banyan_store_write_gb_per_day"],
        store_read_mb_per_s=values["banyan_store_read_mb_per_s"],
        store_layers_per_read=values["banyan_store_layers_per_read"],
        prefix_hints=prefix_hints,
        policy=values["banyan_policy"] or (DEFAULT_POLICY if looks_up and leaves_it_open else SGLANG_POLICY),
        hot_rank_factor=values["banyan_hot_rank_factor"],
        elastic_prefill_tokens=values["banyan_elastic_prefill_tokens"],
        plan=values["banyan_plan"],
        profile=os.path.abspath(values["banyan_profile"]) if values["banyan_profile"] is not None else None,
        prefill_quota_ms=values["banyan_prefill_quota_ms"],
        copy_sms=values["banyan_copy_sms"],
        copy_layers_per_launch=values["banyan_copy_layers_per_launch"],
    )


def uses_expandable_segments() -> bool:
    """Whether torch's CUDA allocator was told to use expandable segments, which CUDA IPC cannot export."""
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in text.lower().replace(" ", "")


def sizes_pool_after_capture() -> bool:
    """Whether SGLang was told to make the KV pool of virtual memory that it fills after CUDA graphs were captured."""
    return os.environ.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "").lower() in ("1", "true", "yes", "y")


def uses_rust_server() -> bool:
    """Whether SGLang's Rust server was chosen; it dispatches without the Python controller."""
    return os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes")


def most_cpu_isa() -> str | None:
    """The instruction set that oneDNN may go up to; None for whatever the processor has."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA")


def allowed_plugins() -> list[str] | None:
    """The plugins that SGLANG_PLUGINS allows; None when it allows all."""
    names = os.environ.get("SGLANG_PLUGINS", "")
    return [name.strip() for name in names.split(",")] if names else None
