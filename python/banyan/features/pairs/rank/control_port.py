# SPDX-License-Identifier: Apache-2.0
"""A prefill server's control socket, without the messages that no decode server sends.

SGLang's socket has no authentication and listens to the whole network. One thread reads it for all requests of a rank,
and ends at the first message that it does not understand: from then on every request waits for its time-out. Here such
a message is dropped and counted before the thread sees it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from banyan.sglang_plugin.rank.reporting import report

logger = logging.getLogger("banyan")

STAGING_NUMBERS = {b"WATERMARK": 2, b"STAGING_RSP": 5}
"""Messages of staging: how many numbers come before the name of their session."""

MAX_STAGING_CHUNKS = 1 << 16
"""Of a prompt. SGLang makes a place for each chunk up to the one that a message names."""

DEFERRED_TAGS = (b"BOOTSTRAP",)
MAX_FRAMES = 64
MAX_MESSAGE_BYTES = 64 << 20
MAX_LISTS_BYTES = 1 << 20
"""Of the frame that SGLang reads into lists of numbers: four times the pages of a prompt of a million tokens, where a
page is 16."""

LIST_TIMES = 16
"""How much more than their bytes those lists take, at most: an empty one is told of by four."""

MAX_NAME = 256
MAX_PEERS = 1024
"""Ranks of decode servers that a rank hears of; and those of one request."""

MAX_TOKENS = 1 << 31
"""Of a prompt."""

REGISTRATION = b"None"
"""In the place of a room's number: a decode server tells where its pool lies."""


@dataclass(frozen=True, slots=True)
class ControlMessages:
    """What the decode servers of one engine send.

    Attributes:
        guard: the frames that each message of theirs begins with, besides aborts and those of ``tags``.
        lists: the place behind these of the frame that is read into lists: what other pools than the first have.
        registration, asking: SGLang's own reading of the two messages, which raises where a part is missing or is not
            what it should be.
        is_likely: whether the numbers of what was read are those of a decode server.
    """

    guard: tuple[bytes, ...]
    lists: int
    registration: Callable[[list[bytes]], Any]
    asking: Callable[[list[bytes]], Any]
    is_likely: Callable[[Any], bool]

    def is_registration(self, message: Sequence[bytes]) -> bool:
        return tuple(message[: len(self.guard) + 1]) == (*self.guard, REGISTRATION)

    def read(self, message: Sequence[bytes]) -> Any | None:
        """What a decode server says by it; None where none speaks so."""
        rest = list(message[len(self.guard) :])
        if tuple(message[: len(self.guard)]) != self.guard or not rest or len(rest) > MAX_FRAMES:
            return None
        if sum(map(len, rest)) > MAX_MESSAGE_BYTES or self._lists_bytes(message) > MAX_LISTS_BYTES:
            return None
        try:
            said = (self.registration if rest[0] == REGISTRATION else self.asking)(rest)
        except (ValueError, IndexError, KeyError, struct.error, ArithmeticError, MemoryError):
            return None
        return said if has_address(said) and self.is_likely(said) else None

    def num_bytes(self, message: Sequence[bytes]) -> int:
        """What it takes when it has been read, about."""
        return sum(map(len, message)) + LIST_TIMES * self._lists_bytes(message)

    def _lists_bytes(self, message: Sequence[bytes]) -> int:
        place = len(self.guard) + self.lists
        return len(message[place]) if place < len(message) else 0


def has_address(said: Any) -> bool:
    """Whether it can be answered."""
    return len(said.endpoint) <= MAX_NAME and 0 < said.dst_port < 65536


def is_room(said: Any) -> bool:
    """Whether a request could be asked for so."""
    has_numbers = 0 <= said.room < 1 << 63 and 0 < said.required_dst_info_num <= MAX_PEERS
    return has_numbers and 0 <= (said.decode_prefix_len or 0) < MAX_TOKENS


def is_of_staging(message: Sequence[bytes], sessions: Container[str]) -> bool:
    """Whether a decode server of one of ``sessions`` says so where what it says of its staging buffer."""
    tag, *numbers, session = message if len(message) > 2 else (b"", b"", b"")
    if tag not in STAGING_NUMBERS or len(numbers) != STAGING_NUMBERS[tag]:
        return False
    try:
        read = [int(number.decode("ascii")) for number in numbers]
        is_known = session.decode("ascii") in sessions
    except ValueError:
        return False
    return is_known and (tag != b"STAGING_RSP" or 0 <= read[1] < MAX_STAGING_CHUNKS)


class ScreenedSocket:
    """SGLang's control socket; ``recv_multipart`` gives what is not foreign. One thread reads, which has
    ``while_heeded`` of a message entered until it comes for the next one."""

    def __init__(
        self,
        socket: Any,
        is_foreign: Callable[[Sequence[bytes]], bool],
        while_heeded: Callable[[Sequence[bytes]], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._socket = socket
        self._is_foreign = is_foreign
        self._while_heeded = while_heeded
        self._heeded = ExitStack()
        self._has_warned = False

    def recv_multipart(self, *args: Any, **kwargs: Any) -> list[bytes]:
        self._heeded.close()
        while self._is_foreign(message := self._socket.recv_multipart(*args, **kwargs)):
            report.counters().foreign_hand_over_messages += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "banyan: dropped a message at the hand-over's control port that no server of a pair sends (more "
                    "are only counted: foreign_hand_over_messages in /server_info)"
                )
        self._heeded.enter_context(self._while_heeded(message))
        return list(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
