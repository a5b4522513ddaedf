# SPDX-License-Identifier: Apache-2.0
"""What a rank has of pairs: what is copied back from its arena, what the other server writes, who hears of layers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from banyan.arena.partner import Partner
from banyan.features.pairs.advance import Forwards
from banyan.features.pairs.others import Others
from banyan.features.pairs.roles import Role
from banyan.features.pairs.take_back import TakeBacks, can_take_back
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.kind import Kind
from banyan.sglang_plugin.rank.one_rank import Rank
from banyan.sglang_plugin.rank.points import Attachment, Points

_at: PairedRank | None = None


def register(points: Points) -> None:
    points.partner = partner_of
    points.attach.append(PairedRank)


def role() -> Role:
    """What this server does in a pair, if it is of one."""
    return Role(runtime.disaggregation_mode())


def partner_of(kind: Kind) -> Partner:
    """What is remembered because another server writes the other part of the rank's conversations."""
    if not role().is_paired:
        return Partner()
    return Others(role(), time.monotonic, takes_back=takes_back(kind))


def takes_back(kind: Kind) -> bool:
    """Whether, on a decode server, the pool is filled from the arena where the prefill server would send else."""
    return can_take_back(
        role(),
        kind.member_slots.layout,
        has_arena=kind.config.has_arena,
        num_pools=kind.pools.num_pools,
        is_on_gpu=not kind.is_on_host,
    )


class PairedRank(Attachment):
    """One rank's, also where the server is of no pair. ``take_backs`` is None where it takes nothing back."""

    def __init__(self, rank: Rank) -> None:
        global _at
        self.rank = rank
        self.forwards = Forwards()
        if role().is_paired:
            rank.layer_done_counter.tell(self.forwards)
        full = rank.kinds.full
        arenas = full.member_slots.arenas
        self.take_backs = TakeBacks(lambda: rank.cache.peers, arenas, rank.counters) if takes_back(full) else None
        _at = self

    def stop(self) -> None:
        if self.take_backs is not None:
            self.take_backs.stop()

    def quiesce(self) -> None:
        if self.take_backs is not None:
            self.take_backs.quiesce()

    def state(self) -> Mapping[str, Any]:
        return {"num_take_backs": 0 if self.take_backs is None else self.take_backs.num_open}


def weights_name() -> str:
    """By which other servers find this server's pages, of the weights that all in its pool were computed with; "" where
    they find none by such a name."""
    return "" if _at is None else _at.rank.weights_name


def has_other_weights(name: str) -> bool:
    """Whether what this server computes is not to have this name."""
    return _at is not None and _at.rank.kinds.full.config.knows_weights and weights_name() != name


def keep_nothing(why: str) -> None:
    """From now on this server's pages have no name, until its cache is flushed. Any thread."""
    if _at is not None:
        _at.rank.hold_back(why)


def weights_epoch() -> int:
    """How often the weights have changed."""
    return 0 if _at is None else _at.rank.weights_epoch


def installed() -> PairedRank:
    """What the rank of this process has.

    Raises:
        RuntimeError: when it has not been put together.
    """
    if _at is None:
        raise RuntimeError("no rank has been put together in this process")
    return _at
