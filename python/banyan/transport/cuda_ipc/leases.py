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

    def heard(self, slots: Sequence[int]) -> Sequence[bytes]: ...

    def touch(self, match: Any) -> None: ...

    def lease(self, match: Any, keys: Sequence[str]) -> NativeLease | None: ...

    def present(self) -> list[Peer]: ...


@dataclass(slots=True)
class CudaLease:
    """Pages that may be copied, with the rows of their peers. Implements ``banyan.ports.Lease``."""

    num_pages: int
    runs: list[tuple[int, int]]
    rows: list[tuple[int, bytes]]
    _give_back: Callable[[], None]
    _is_held: bool = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._give_back()
