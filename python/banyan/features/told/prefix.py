# SPDX-License-Identifier: Apache-2.0
"""One prefix that is kept, and what it is to another one: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Prefix:
    """``tenant``: who pays for it. ``keys``: of its pages. ``is_pin``: it does not make room. ``space``: what its keys
    begin with; a tenant may have several."""

    tenant: str
    keys: Sequence[str]
    is_pin: bool
    expires_s: float
    session: str | None
    space: str = ""
    is_in_pool: bool = False

    @property
    def row(self) -> tuple[str, str, str | None, bool]:
        """In the table. One prompt has several, for each ends when its own session or time is over."""
        return self.tenant, self.keys[-1], self.session, self.is_pin


def is_one_chain(keys: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one begins the other: the key of a page stands for all before it."""
    last = min(len(keys), len(others)) - 1
    return keys[last] == others[last]


def takes_in(new: Prefix, old: Prefix) -> bool:
    """Whether the one that is told now makes the other superfluous."""
    if (new.tenant, new.session) != (old.tenant, old.session):
        return False
    if len(old.keys) > len(new.keys) or not is_one_chain(old.keys, new.keys):
        return False
    return new.row == old.row or (
        (new.is_pin or not old.is_pin) and (new.is_in_pool or not old.is_in_pool) and new.expires_s >= old.expires_s
    )
