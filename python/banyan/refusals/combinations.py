# SPDX-License-Identifier: Apache-2.0
"""Flags of Banyan's own that contradict each other: pure, one line for each, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from banyan.config import Config
    from banyan.feature import Asked


_OF_MOVING = ("--banyan-min-fetch-tokens", "--banyan-plan", "--banyan-copy-")
_OF_NODES = ("--banyan-in-flight-kb", "--banyan-carrier")
_OF_SHARING = (
    *("--banyan-host-gb", "--banyan-keep-host-arena", "--banyan-store", "--banyan-listen", "--banyan-peers"),
    *("--banyan-told-share", "--banyan-tenant-share", "--banyan-tell-lines", "--banyan-no-prefix-hints"),
    *_OF_MOVING,
    *_OF_NODES,
)


def idle_lines(asked: Asked, given: Sequence[str]) -> list[str]:
    """A line for each reason why flags that were given do nothing."""
    wanted, is_of_a_pair = asked.config, asked.disaggregation_mode != "null"
    has_nodes = wanted.shares and wanted.deals_with_nodes
    has_one_rank = asked.layout is not None and asked.layout.num_ranks == 1
    causes = (
        (not wanted.shares, _OF_SHARING, "with --banyan-share off: nothing is kept or lent"),
        (
            wanted.shares and not wanted.fetches and not wanted.has_arena,
            _OF_MOVING,
            "with --banyan-share index and no host arena: nothing is moved",
        ),
        (wanted.shares and not wanted.store, ("--banyan-store-",), "without --banyan-store: no effect"),
        (
            any(place.startswith("mooncake://") for place in wanted.store),
            ("--banyan-store-gb",),
            "with mooncake://: the clients that contribute memory set the capacity",
        ),
        (wanted.shares and not has_nodes, _OF_NODES, "without --banyan-listen, --banyan-peers: no effect"),
        (has_nodes and not wanted.listen, ("--banyan-in-flight-kb",), "without --banyan-listen: nothing is lent"),
        (
            not has_nodes and not is_of_a_pair,
            ("--banyan-secret-file", "--banyan-dscp"),
            "without --banyan-listen, --banyan-peers or --disaggregation-mode: no effect",
        ),
        (not is_of_a_pair, ("--banyan-ib-service-level",), "without --disaggregation-mode: no effect"),
        (
            wanted.policy == "sglang" or has_one_rank,
            ("--banyan-hot-rank-factor",),
            "with --banyan-policy sglang or one rank: Banyan chooses no rank",
        ),
        (asked.device == "cpu", ("--banyan-copy-",), "with --device cpu: no effect"),
    )
    idle = [([flag for flag in given if flag.startswith(names)], why) for applies, names, why in causes if applies]
    return [f"{', '.join(flags)} {why}" for flags, why in idle if flags]


def combination_refusal(asked: Config) -> str | None:
    """The line for the first contradiction; None where there is none."""
    if asked.keep_host_arena and not asked.host_gb:
        return "--banyan-keep-host-arena: the next start finds it by its size: set a size with --banyan-host-gb as well"
    if asked.store and asked.shares and not asked.has_arena:
        return "--banyan-store: pages come and go by way of the host arena: set --banyan-host-gb as well"
    if asked.deals_with_nodes and asked.shares and not asked.has_arena:
        return (
            "--banyan-listen, --banyan-peers: pages come and go by way of the host arena: use --banyan-share peer, or "
            "set --banyan-host-gb as well"
        )
    if asked.deals_with_nodes and not asked.secret_file:
        return (
            "--banyan-listen, --banyan-peers: nodes know each other by a secret: write one with "
            "`(umask 077; openssl rand -hex 32 > FILE)` and pass --banyan-secret-file FILE"
        )
    if asked.tenant_share is not None and not asked.tenant_secret_file:
        return (
            "--banyan-tenant-share: the server learns from the router whose a page is: pass "
            "--banyan-tenant-secret-file as well"
        )
    if asked.tenant_share is not None and not asked.has_arena:
        return "--banyan-tenant-share: it is a share of the host arena: set --banyan-host-gb as well"
    if asked.policy != "sglang" and not asked.looks_up:
        way_out = "drop --banyan-no-prefix-hints" if asked.shares else "use --banyan-share index"
        return (
            f"--banyan-policy {asked.policy}: there is nothing to look up with --banyan-share off or "
            f"--banyan-no-prefix-hints: {way_out}, or use --banyan-policy sglang"
        )
    return None
