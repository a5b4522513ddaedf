# SPDX-License-Identifier: Apache-2.0
"""By what the pages of each node come to a borrower: by NIXL where both ends have it now and it brings them, else over
TCP; and from which nodes none come for a while, because TCP does not bring them either."""

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
"""Pulls by one carrier in a row: a network that does not let it through, or a plugin that does not read there."""

PAUSE_S, MOST_DOUBLINGS = 60, 6
"""That carrier is not used so long then, and twice as long after each pull behind it that fails, too."""


class _Pauses:
    """One carrier's, at each node. ``said`` when one begins: of which node, and for how long."""

    def __init__(self, nodes: Sequence[Address], said: str, clock: Callable[[], float]) -> None:
        self._nodes = nodes
        self._said = said
        self._clock = clock
        self._num_failed: Counter[int] = Counter()
        self._until_s: dict[int, float] = {}

    def is_on(self, node: int) -> bool:
        return self._clock() < self._until_s.get(node, 0.0)

    def failed(self, node: int) -> None:
        if self.is_on(node):
            return
        self._num_failed[node] += 1
        if self._num_failed[node] >= NUM_FAILED:
            pause_s = PAUSE_S << min(MOST_DOUBLINGS, self._num_failed[node] - NUM_FAILED)
            self._until_s[node] = self._clock() + pause_s
            logger.warning(self._said, self._nodes[node], pause_s)

    def brought(self, node: int) -> None:
        del self._num_failed[node]


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
        self._num_over_tcp: Counter[int] = Counter()
        self._nixl_pauses = _Pauses(
            nodes,
            "banyan: NIXL does not bring the pages of the node at %s: they come over TCP for %d s; open NIXL's ports "
            "between the nodes (UCX_TCP_PORT_RANGE), or start with --banyan-carrier tcp",
            clock,
        )
        self._tcp_pauses = _Pauses(
            nodes,
            "banyan: the node at %s answers, but its pages do not come, or come damaged: it is not asked for %d s; see "
            "that the port behind this one is open",
            clock,
        )

    def rests(self, node: int) -> bool:
        """Whether it is to be asked for nothing now: it may answer in time, and its bytes do not come."""
        return self._tcp_pauses.is_on(node)

    def borrow(self, node: int, number: int, namespace: bytes, keys: bytes) -> Borrow:
        if self._reads(node):
            return BorrowToRead(number, namespace, keys, self._by_nixl[node].backend)
        return Borrow(number, namespace, keys)

    def of(self, node: int, remote_lease: RemoteLease) -> Carrier:
        """What can be read is good over TCP, too."""
        if isinstance(remote_lease, ReadableLease) and self._reads(node):
            del self._num_over_tcp[node]
            return self._by_nixl[node].carrier(remote_lease)
        if not self._by_nixl or self._nixl_pauses.is_on(node):
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
        pauses = self._tcp_pauses if carrier is self._tcp else self._nixl_pauses
        if ended is Ended.WHOLE:
            pauses.brought(node)
            self._tcp_pauses.brought(node)
        elif ended is not Ended.GIVEN_UP:
            # What NIXL does not bring may come over TCP, so it is no reason to leave the node alone.
            pauses.failed(node)

    def _reads(self, node: int) -> bool:
        """Whether NIXL does, there and now."""
        return bool(self._by_nixl) and not self._nixl_pauses.is_on(node) and self._by_nixl[node].is_ready

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
