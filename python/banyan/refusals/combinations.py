# SPDX-License-Identifier: Apache-2.0
"""Flags of Banyan's own that contradict each other: pure, one line for each, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from banyan.config import Config


_OF_NODES = ("--banyan-secret-file", "--banyan-in-flight-kb")
_OF_SHARING = (
    "--banyan-host-gb",
    "--banyan-keep-host-arena",
    "--banyan-store",
    "--banyan-listen",
    "--banyan-peers",
    *_OF_NODES,
)


def idle_lines(asked: Config, given: Sequence[str]) -> list[str]:
    """A line for each reason why flags that were given do nothing."""
    causes = (
        (not asked.shares, _OF_SHARING, "with --banyan-share off: nothing is kept or lent"),
        (asked.shares and not asked.store, ("--banyan-store-",), "without --banyan-store: no effect"),
        (asked.shares and not asked.deals_with_nodes, _OF_NODES, "without --banyan-listen, --banyan-peers: no effect"),
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
