# SPDX-License-Identifier: Apache-2.0
"""Page numbers come from a GPU to the host, and are acted on in the order in which SGLang acted.

SGLang frees pages, and gives new ones their keys, while numbers are on their way: a key that moves from one page to
another must be withdrawn before it is published, a page that was freed behind its offer published before it is
withdrawn. So nothing overtakes anything, whichever pool it is of.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Sender(Protocol):
    """What was sent by one lane, oldest first."""

    def take_next(self) -> bool:
        """Act on the oldest list that was sent; False when it has not come."""


class ReadbackOrder:
    """Of a rank: all lists that are on their way, oldest first."""

    def __init__(self) -> None:
        self._senders: deque[Sender] = deque()

    def sent(self, sender: Sender) -> None:
        self._senders.append(sender)

    def forget(self, sender: Sender) -> None:
        """It will not act on what it has sent."""
        self._senders = deque(other for other in self._senders if other is not sender)

    def take(self) -> None:
        """Act on what has come. Never waits."""
        while self._senders and self._senders[0].take_next():
            self._senders.popleft()
