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

SHARE_CHOICES = ("peer", "off")
DEFAULT_PAGE_TOKENS = 16
GIB = 1 << 30
CPU_ATTENTION_BACKEND = "banyan_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user asked for.

    Attributes:
        share: "peer" fetches pages from other ranks; "off" installs the CPU engine's fixes only, the fair baseline.
        min_fetch_tokens: shorter matches are computed. One page by default: copying a page beats computing it.
        prefix_hints: whether the dispatcher looks every prompt up and tells the rank what it saw.
        host_gb: DRAM of the node for pages that have left the pools, in GiB, over all ranks; 0: none.
    """

    share: str = "peer"
    min_fetch_tokens: int = DEFAULT_PAGE_TOKENS
    prefix_hints: bool = True
    host_gb: float = 0.0

    def __post_init__(self) -> None:
        if self.share not in SHARE_CHOICES:
            raise ValueError(f"--banyan-share {self.share}: choose one of {', '.join(SHARE_CHOICES)}")
        if self.min_fetch_tokens < 1:
            raise ValueError(f"--banyan-min-fetch-tokens {self.min_fetch_tokens}: at least 1 token")
        if not 0 <= self.host_gb < float("inf"):
            raise ValueError(f"--banyan-host-gb {self.host_gb}: a size in GiB, or 0 for no host arena")

    @property
    def shares(self) -> bool:
        return self.share != "off"

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena over all ranks."""
        return int(self.host_gb * GIB)

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
        help="peer: fetch pages from other ranks. off: no sharing, only the CPU engine's attention and poller.",
    )
    group.add_argument(
        "--banyan-min-fetch-tokens",
        type=int,
        default=DEFAULT.min_fetch_tokens,
        metavar="TOKENS",
        help="Compute, do not fetch, matches shorter than this.",
    )
    group.add_argument(
        "--banyan-host-gb",
        type=float,
        default=DEFAULT.host_gb,
        metavar="GIB",
        help="Keep pages that leave the pools in this much DRAM, one copy for all ranks of the node. 0: none.",
    )
    group.add_argument(
        "--banyan-no-prefix-hints",
        action="store_true",
        help="Do not look prompts up in the dispatcher (saves it a hash of every prompt).",
    )


def take_flags(args: argparse.Namespace) -> Config | None:
    """Remove Banyan's flags from the namespace; None when Banyan was not asked for.

    Raises:
        ValueError: for a value out of range, naming the flag.
    """
    values = {name: vars(args).pop(name) for name in list(vars(args)) if name.startswith("banyan_")}
    if not vars(args).pop("enable_banyan", False):
        return None
    return Config(
        share=values["banyan_share"],
        min_fetch_tokens=values["banyan_min_fetch_tokens"],
        prefix_hints=not values["banyan_no_prefix_hints"],
        host_gb=values["banyan_host_gb"],
    )


def uses_expandable_segments() -> bool:
    """Whether torch's CUDA allocator was told to use expandable segments, which CUDA IPC cannot export."""
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in text.lower().replace(" ", "")


def uses_rust_server() -> bool:
    """Whether SGLang's Rust server was chosen; it dispatches without the Python controller."""
    return os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes")


def allowed_plugins() -> list[str] | None:
    """The plugins that SGLANG_PLUGINS allows; None when it allows all."""
    names = os.environ.get("SGLANG_PLUGINS", "")
    return [name.strip() for name in names.split(",")] if names else None
