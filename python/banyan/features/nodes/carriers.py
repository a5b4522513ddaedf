# SPDX-License-Identifier: Apache-2.0
"""By what the pages of each node come to a borrower: by NIXL where both ends have it now, else over TCP."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from banyan.core import Address
from banyan.features.nodes.nixl_pulls import NixlCarrier, ReadByNixl
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import Borrow, BorrowToRead, ReadableLease, RemoteLease

logger = logging.getLogger("banyan")

NUM_UNTIL_SAID = 3
"""The processes of both ends may be starting."""

Carrier = TcpCarrier | NixlCarrier
"""Brings the layers of a remote lease, in order, and says when each is there."""


class Carriers:
    """One borrower's. Any thread. ``by_nixl``: for each node what reads there, or nothing."""

    def __init__(self, nodes: Sequence[Address], tcp: TcpCarrier, by_nixl: Sequence[ReadByNixl] = ()) -> None:
        self._nodes = nodes
        self._tcp = tcp
        self._by_nixl = by_nixl
        self._num_over_tcp: Counter[int] = Counter()

    def borrow(self, node: int, number: int, namespace: bytes, keys: bytes) -> Borrow:
        if self._by_nixl and self._by_nixl[node].is_ready:
            return BorrowToRead(number, namespace, keys, self._by_nixl[node].backend)
        return Borrow(number, namespace, keys)

    def of(self, node: int, remote_lease: RemoteLease) -> Carrier:
        if not self._by_nixl:
            return self._tcp
        if isinstance(remote_lease, ReadableLease):
            del self._num_over_tcp[node]
            return self._by_nixl[node].carrier(remote_lease)
        self._num_over_tcp[node] += 1
        if self._num_over_tcp[node] == NUM_UNTIL_SAID:
            logger.warning(
                "banyan: pages from the node at %s come over TCP: it has another --banyan-carrier, or the NIXL process "
                "of one end is not up now",
                self._nodes[node],
            )
        return self._tcp

    def nixl_state(self) -> dict[str, int]:
        """Nodes that can be read by it now, pulls that were carried so, and processes that were started."""
        return {
            "num_nixl_ready": sum(reader.is_ready for reader in self._by_nixl),
            "num_by_nixl": sum(reader.num_carried for reader in self._by_nixl),
            "num_nixl_started": sum(reader.num_started for reader in self._by_nixl),
        }

    def close(self) -> None:
        for reader in self._by_nixl:
            reader.close()
