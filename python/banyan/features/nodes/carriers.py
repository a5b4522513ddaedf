# SPDX-License-Identifier: Apache-2.0
"""By what the pages of each node come to a borrower: by NIXL where both ends have it now and it brings them, else over
TCP."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from banyan.core import Address
from banyan.features.nodes.nixl_pulls import ReadByNixl
from banyan.features.nodes.pull import Carrier, Ended
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import Borrow, BorrowToRead, ReadableLease, RemoteLease

logger = logging.getLogger("banyan")

NUM_UNTIL_SAID = 3
"""The processes of both ends may be starting."""

NUM_FAILED = 3
"""Pulls by NIXL in a row: a network that does not let it through, or a plugin that does not read there."""

PAUSE_S, MOST_DOUBLINGS = 60, 6
"""Pages come over TCP so long then, and twice as long after each pull behind it that fails, too."""


class Carriers:
    """One borrower's. Any thread. ``by_nixl``: for each node what reads there, or nothing."""

    def __init__(
        self,
        nodes: Sequence[Address],
        tcp: TcpCarrier,
        by_nixl: Sequence[ReadByNixl] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._tcp = tcp
        self._by_nixl = by_nixl
        self._clock = clock
        self._num_over_tcp: Counter[int] = Counter()
        self._num_failed: Counter[int] = Counter()
        self._tcp_until_s: dict[int, float] = {}

    def borrow(self, node: int, number: int, namespace: bytes, keys: bytes) -> Borrow:
        if self._reads(node):
            return BorrowToRead(number, namespace, keys, self._by_nixl[node].backend)
        return Borrow(number, namespace, keys)

    def of(self, node: int, remote_lease: RemoteLease) -> Carrier:
        """What can be read is good over TCP, too."""
        if isinstance(remote_lease, ReadableLease) and self._reads(node):
            del self._num_over_tcp[node]
            return self._by_nixl[node].carrier(remote_lease)
        if not self._by_nixl or self._is_paused(node):
            return self._tcp
        self._num_over_tcp[node] += 1
        if self._num_over_tcp[node] == NUM_UNTIL_SAID:
            logger.warning(
                "banyan: pages from the node at %s come over TCP: it has another --banyan-carrier, or the NIXL process "
                "of one end is not up now",
                self._nodes[node],
            )
        return self._tcp

    def ended(self, node: int, carrier: Carrier, ended: Ended) -> None:
        """What became of a pull from ``node`` that ``carrier`` has brought."""
        if carrier is self._tcp or ended is Ended.GIVEN_UP:
            return
        if ended is Ended.WHOLE:
            del self._num_failed[node]
        elif not self._is_paused(node):
            self._num_failed[node] += 1
            if self._num_failed[node] >= NUM_FAILED:
                self._pause(node, PAUSE_S << min(MOST_DOUBLINGS, self._num_failed[node] - NUM_FAILED))

    def _pause(self, node: int, pause_s: int) -> None:
        self._tcp_until_s[node] = self._clock() + pause_s
        logger.warning(
            "banyan: NIXL does not bring the pages of the node at %s: they come over TCP for %d s; open NIXL's ports "
            "between the nodes (UCX_TCP_PORT_RANGE), or start with --banyan-carrier tcp",
            self._nodes[node],
            pause_s,
        )

    def _reads(self, node: int) -> bool:
        """Whether NIXL does, there and now."""
        return bool(self._by_nixl) and not self._is_paused(node) and self._by_nixl[node].is_ready

    def _is_paused(self, node: int) -> bool:
        return self._clock() < self._tcp_until_s.get(node, 0.0)

    def nixl_state(self) -> dict[str, int]:
        """Nodes that can be read by it now, pulls that were carried so, and processes that were started."""
        return {
            "num_nixl_ready": sum(self._reads(node) for node in range(len(self._by_nixl))),
            "num_by_nixl": sum(reader.num_carried for reader in self._by_nixl),
            "num_nixl_started": sum(reader.num_started for reader in self._by_nixl),
        }

    def close(self) -> None:
        for reader in self._by_nixl:
            reader.close()
