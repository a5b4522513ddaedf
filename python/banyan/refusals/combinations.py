# SPDX-License-Identifier: Apache-2.0
"""Flags of Banyan's own that contradict each other: pure, one line for each, with the way out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlagFacts:
    """What the flags of one server ask for.

    Attributes:
        names_arena_size: ``--banyan-host-gb`` is a size above zero, or ``auto``.
        policy: the value of ``--banyan-policy``; ``places`` says whether it is Banyan's.
        looks_up: the dispatcher sees what ranks hold.
    """

    keeps_arena: bool
    names_arena_size: bool
    has_store: bool
    has_arena: bool
    policy: str
    places: bool
    looks_up: bool
    deals_with_nodes: bool
    has_secret: bool


def combination_refusal(facts: FlagFacts) -> str | None:
    """The line for the first contradiction; None where there is none."""
    if facts.keeps_arena and not facts.names_arena_size:
        return "--banyan-keep-host-arena: what is kept is found again by its size: set --banyan-host-gb to one as well"
    if facts.has_store and not facts.has_arena:
        return "--banyan-store: pages come and go by way of the host arena: set --banyan-host-gb as well"
    if facts.deals_with_nodes and not facts.has_arena:
        return (
            "--banyan-listen, --banyan-peers: pages come and go by way of the host arena: use --banyan-share peer, or "
            "set --banyan-host-gb as well"
        )
    if facts.deals_with_nodes and not facts.has_secret:
        return (
            "--banyan-listen, --banyan-peers: nodes know each other by a secret: write one with "
            "`(umask 077; openssl rand -hex 32 > FILE)` and pass --banyan-secret-file FILE"
        )
    if facts.places and not facts.looks_up:
        return (
            f"--banyan-policy {facts.policy}: there is nothing to look up with --banyan-share off or "
            "--banyan-no-prefix-hints: use --banyan-share index, or --banyan-policy sglang"
        )
    return None
