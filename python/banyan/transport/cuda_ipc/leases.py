# SPDX-License-Identifier: Apache-2.0
"""Leases of pages that lie on GPUs, and the part of the native directory that grants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from banyan.ports import Match
from banyan.transport.cuda_ipc.mappings import Peer


class NativeLease(Protocol):
    """A lease of the native directory, which knows the frames behind it."""

    num_pages: int
    runs: list[tuple[int, int]]

    def sources(self) -> list[tuple[int, int, bytes]]: ...

    def release(self) -> None: ...


class Directory(Protocol):
    """The part of ``banyan._native.Peers`` that does not touch pages."""

    def version(self) -> int: ...

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match: ...

    def holders(self, keys: Sequence[str], slots: Sequence[int]) -> Sequence[int | None]: ...

    def read_access_logs(self, slots: Sequence[int]) -> Sequence[bytes]: ...

    def touch(self, match: Any) -> None: ...

    def lease(self, match: Any, keys: Sequence[str]) -> NativeLease | None: ...

    def present(self) -> list[Peer]: ...


class LeaseEnds(Protocol):
    """``banyan._native.LeaseEnds``."""

    def expect(self, leases: list[Any]) -> int: ...


@dataclass(frozen=True, slots=True)
class LeaseWord:
    """The word at ``address`` that a stream writes behind its copies, and who ends the leases when it has.

    A lease is a promise of its owner, who may be waiting for the page: it ends with the copy, whatever this rank's
    scheduler is doing then (waiting for the other ranks, compiling, paused).
    """

    ends: LeaseEnds
    address: int


@dataclass(slots=True)
class CudaLease:
    """Pages that may be copied, with the rows of their peers. Implements ``banyan.ports.Lease``."""

    native: NativeLease
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
