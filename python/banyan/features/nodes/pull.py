# SPDX-License-Identifier: Apache-2.0
"""Pages of a remote lease on their way into this rank's part of the arena, verified layer by layer.

Invariants
  1. A page counts as landed in a layer only when its checksum agrees: it was said by the page server, over the channel
     that the secret protects, and is bound to namespace, page key and layer.
  2. The frames are written until `carry` returns, and not afterwards: then the read has ended, whatever happened. Where
     the carrier cannot have that, the read is late, and ends when it can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from banyan import _native
from banyan.core import Address
from banyan.features.nodes.exported_arena import PartFrames
from banyan.features.nodes.nixl_pulls import NixlCarrier
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import Foreign, RemoteLease, unpack_sums
from banyan.transport.nixl.process import StillWriting

Carrier = TcpCarrier | NixlCarrier
"""Brings the layers of a remote lease, in order, and says when each is there."""


class Ended(Enum):
    """How a pull ended."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    GIVEN_UP = "given up"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NodeFound:
    """Leading pages that a node said to have. ``origin``: its address. ``others`` said to have no more of the same.
    Implements ``ports.StoreFound``."""

    origin: str
    node: int
    keys: Sequence[str]
    others: tuple[NodeFound, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    def after(self, num_pages: int, /) -> NodeFound:
        # Whose they are to be is chosen before.
        return NodeFound(self.origin, self.node, self.keys[num_pages:])


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Pages wanted of one node, and the frames that they go to."""

    namespace: bytes
    keys: Sequence[str]
    target: PartFrames[_native.SharedBytes]
    feed: _native.Feed

    def carry(
        self, remote_lease: RemoteLease, host: str, carrier: Carrier, is_wanted: Callable[[], bool] = lambda: True
    ) -> Ended:
        """Bring the bytes of ``remote_lease``, as long as it ``is_wanted``. Blocks; any thread."""
        try:
            ended = self._carry(remote_lease, host, carrier, is_wanted)
        except StillWriting as still:
            self.feed.be_late()
            still.when_over(self.feed.end)
            return Ended.LOST
        except BaseException:
            self.feed.end()
            raise
        self.feed.end()
        return ended

    def _carry(self, remote_lease: RemoteLease, host: str, carrier: Carrier, is_wanted: Callable[[], bool]) -> Ended:
        target, num_layers = self.target, len(self.target.layer_bytes)
        damaged: set[int] = set()
        try:
            sums = unpack_sums(remote_lease.sums, num_pages=len(self.keys), num_layers=num_layers)
            source = Address(host, remote_lease.port)
            layers = carrier.pull(source, remote_lease.token, target, num_layers, is_wanted=is_wanted)
            with contextlib.closing(layers):
                for layer in layers:
                    if not self.feed.is_wanted:
                        return Ended.GIVEN_UP
                    pairs = zip(target.sums(self.namespace, self.keys, layer), sums[layer], strict=True)
                    wrong = [page for page, (seen, said) in enumerate(pairs) if seen != said]
                    self.feed.land(len(self.keys) * target.layer_bytes[layer], wrong)
                    damaged.update(wrong)
                    if len(damaged) == len(self.keys):
                        # What would come behind it is good for nothing.
                        break
        except (OSError, Foreign):
            return Ended.LOST if is_wanted() else Ended.GIVEN_UP
        return Ended.DAMAGED if damaged else Ended.WHOLE
