# SPDX-License-Identifier: Apache-2.0
"""How a rank reaches its pool and announces it: on the host at once, on a GPU in stream order.

The linker knows ``PoolAccess`` and not the device. All calls come from the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from banyan import _native
from banyan.layout import BlockGeometry
from banyan.planner import Piece
from banyan.ports import OwnFrameTable, Peers
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.quarantine import OwnPages
from banyan.transport.cuda_ipc.host_pieces import HostPieces
from banyan.transport.cuda_ipc.layer_times import LayerTimer

Window = tuple[Sequence[str], Any]
"""Keys of a node's window pages, and their page numbers as ``frames`` of their own pool gives them; of a model that has
such (``banyan.features.windows.pools.two_pools``)."""

Publish = Callable[[Any, list[str], Window | None], None]
"""Takes page numbers, an int64 array, and their keys; with them the window pages of the same node."""


DeviceTimer = LayerTimer[tuple[Piece, ...]]
"""Times prefills by the device's own clock, where that of the calling thread shows launches only. What begins is a
prefill of these pieces."""


class PoolAccess(Protocol):
    """What differs between a pool on the host and one on a GPU. What has a body is that of a pool on the host."""

    shares_pool: bool
    """Whether peers read the pool itself; if not, they find its pages in the host arena."""

    @property
    def all_read_pool(self) -> bool:
        """Whether there is no peer that does not."""
        return self.shares_pool

    pins: HostPieces | None = None
    """What makes this rank's part known to a device as it is needed; None where there is no part, or no device."""

    follows_reads: bool
    """Whether a copy into the pool can follow a read of the store; if not, pages are leased once they have landed."""

    link_bytes_per_s: float = 0.0
    """How fast pages move between the pool and the arena, as measured at the start; 0.0 where that was not done."""

    def attach(self, publish: Publish) -> None:
        """Pages that are complete go to ``publish`` from now on."""

    def guard(self, allocator: QuarantiningAllocator, pages: OwnPages) -> None:
        """From now on ``allocator`` withdraws freed pages from ``pages`` before it hands them out."""

    def frames(self, slots: torch.Tensor) -> Any:
        """Page numbers of whole pages of ``slots``, in the form that the source's ``start_copy`` takes."""

    def join(self, namespace: bytes) -> tuple[OwnFrameTable, Peers]:
        """Announce the pool in the rank table and open the view of the others."""

    def arena_peers(self, namespace: bytes, block: BlockGeometry, memory: _native.SharedBytes) -> Peers:
        """A view whose copies go down into this rank's part of the host arena."""

    def offload(self, slots: torch.Tensor, keys: list[str], window: Window | None = None) -> bool:
        """Publish the pages of a node as soon as they are complete, of both pools at once; False when that cannot be
        promised. SGLang holds the node until it is told."""

    def offer_again(self, slots: torch.Tensor, keys: list[str], window: Window) -> None:
        """As ``offload``, of a node that nobody holds, and SGLang is not told: pages that are freed meanwhile are
        withdrawn nevertheless."""

    def time_layers(self, num_layers: int, took: Callable[[tuple[Piece, ...], float], None]) -> DeviceTimer | None:
        """What times prefills by the device's clock and tells ``took``; None where the caller's clock does."""
        return None

    def poll(self) -> None:
        """Go on with what the device has finished. Called on every scheduling step; never waits."""

    @property
    def num_completed(self) -> int:
        """Offloads that are done and not popped, counted in the order of ``offload``."""

    def pop_completed(self) -> bool:
        """Take the oldest one; whether it was published."""

    def give_up_offloads(self) -> None:
        """Those that are under way are done, unpublished."""
        return

    def wait_for_copies(self) -> None:
        """Before pages are withdrawn or memory is given away: wait until no copy is under way.

        Raises:
            RuntimeError: when the device does not come to an end with them.
        """
        return

    def leave(self) -> None:
        """Before the rank leaves its namespace: let go of its peers, drop what is not published. No copy is under way
        but those of the tiers, which end meanwhile."""
        return

    def state(self) -> dict[str, int]:
        """What this way to the pool has taken of the machine, for ``/server_info``."""
        return {}

    def forget(self) -> None:
        """After a flush: SGLang has forgotten its offloads, so they are neither published nor counted."""
