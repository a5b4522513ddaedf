# SPDX-License-Identifier: Apache-2.0
"""What a door says to each message: no socket, no thread of its own.

Invariants
  1. What is lent is leased, and no more than a part of the arena (`Loans`).
  2. A door that lends nothing answers all the same: that it refuses.
  3. After ``withdraw`` nothing of the stock is held here.

States: lending nothing <-> lending a stock (one namespace). Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from banyan.features.nodes.goods import ArenaStock
from banyan.features.nodes.loans import Loans
from banyan.features.nodes.wire import Answer, Ask, Borrow, Loan, Refused, Return, ToBorrower, pack_sums, unpack_keys

OTHER_WEIGHTS = "other weights, or another layout of KV"


class Lending:
    """One door's."""

    def __init__(self, *, max_pages: int, clock: Callable[[], float]) -> None:
        """``max_pages``: lent at once."""
        self.loans = Loans(max_pages=max_pages, clock=clock)
        self.num_pages = 0
        """Pages lent so far."""
        self.num_refused = 0
        self._lock = threading.Lock()
        self._stock: ArenaStock | None = None

    def lend(self, stock: ArenaStock) -> None:
        """From now on lend from ``stock``."""
        with self._lock:
            self._stock = stock

    def withdraw(self) -> None:
        """Lend nothing any more; what was lent is called in."""
        with self._lock:
            self._stock = None
            self.loans.call_in()

    def lends(self, namespace: bytes) -> bool:
        """Whether pages of that namespace are lent now."""
        stock = self._stock
        return stock is not None and stock.namespace == namespace

    def answer(self, message: Ask | Borrow | Return, *, port: int, num_reserved: int = 0) -> ToBorrower | None:
        """What to say to who sent ``message``, if anything; the bytes of a loan come from ``port``. ``num_reserved``
        pages of room were kept for it."""
        if isinstance(message, Return):
            self.loans.give_back(message.token)
            return None
        with self._lock:
            answer = self._answer(message, port, num_reserved)
        self.num_refused += isinstance(answer, Refused)
        return answer

    def _answer(self, message: Ask | Borrow, port: int, num_reserved: int) -> ToBorrower:
        stock = self._stock
        if stock is None or stock.namespace != message.namespace:
            return Refused(message.number, OTHER_WEIGHTS)
        keys = unpack_keys(message.keys)
        if isinstance(message, Ask):
            return Answer(message.number, stock.num_pages(keys))
        if not self.loans.has_room(len(keys) - num_reserved):
            return Refused(message.number, "too much is lent")
        leased = stock.lease(keys)
        if leased is None:
            return Refused(message.number, "gone")
        lease, goods = leased
        sums = pack_sums(goods.sums(stock.namespace, keys))
        lent = self.loans.lend(lease, goods)
        self.num_pages += len(keys)
        return Loan(message.number, lent.token, port, sums)
