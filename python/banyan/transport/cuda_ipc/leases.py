# SPDX-License-Identifier: Apache-2.0
"""Leases of pages that lie on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from banyan import _native


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """The word at ``address`` that a stream writes behind its copies, and who ends the leases when it has.

    A lease is a promise of its owner, who may be waiting for the page: it ends with the copy, whatever this rank's
    scheduler is doing then (waiting for the other ranks, compiling, paused).
    """

    ends: _native.LeaseEnds
    address: int


@dataclass(slots=True)
class CudaLease:
    """Pages that may be copied, with the rows of their peers. Implements ``banyan.ports.Lease``."""

    native: _native.Lease
    rows: list[tuple[int, bytes]]
    _give_back: Callable[[], None]
    _is_held: bool = True

    @property
    def num_pages(self) -> int:
        return self.native.num_pages

    @property
    def runs(self) -> list[tuple[int, int]]:
        return self.native.runs

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._give_back()
