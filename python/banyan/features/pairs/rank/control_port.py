# SPDX-License-Identifier: Apache-2.0
"""A prefill server's control socket, without the messages that no decode server sends.

SGLang's socket has no authentication and listens to the whole network. One thread reads it for all requests of a rank,
and ends at the first message that it does not understand: from then on every request waits for its time-out. Here such
a message is dropped and counted before the thread sees it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.common.conn import ABORT_TAG
from sglang.srt.disaggregation.nixl.conn import GUARD, KVArgsRegisterInfo, TransferInfo

logger = logging.getLogger("banyan")

STAGING_TAGS = (b"WATERMARK", b"STAGING_RSP")
MAX_FRAMES = 64
MAX_MESSAGE_BYTES = 64 << 20
MAX_NAME = 256
MAX_PEERS = 1024
"""Ranks of decode servers that a rank hears of; and those of one request."""

REGISTRATION = b"None"
"""In the place of a room's number: a decode server tells where its pool lies."""


def is_foreign(message: Sequence[bytes], *, stages: bool) -> bool:
    """Whether no decode server sends this. ``stages``: staging is on, which has messages of its own."""
    tag, *rest = message
    if tag in STAGING_TAGS:
        return not stages
    if tag == ABORT_TAG:
        # SGLang reads these with care.
        return False
    if tag != GUARD or not rest or len(rest) > MAX_FRAMES or sum(map(len, rest)) > MAX_MESSAGE_BYTES:
        return True
    try:
        # SGLang's own reading of it, which raises where a part is missing or is not what it should be.
        said = (KVArgsRegisterInfo if rest[0] == REGISTRATION else TransferInfo).from_zmq(list(rest))
    except (ValueError, IndexError, KeyError, struct.error, ArithmeticError, MemoryError):
        return True
    return not _is_likely(said)


def _is_likely(said: KVArgsRegisterInfo | TransferInfo) -> bool:
    """Whether its numbers are those of a decode server."""
    if len(said.agent_name) > MAX_NAME or len(said.endpoint) > MAX_NAME or not 0 < said.dst_port < 65536:
        return False
    if isinstance(said, TransferInfo):
        return 0 <= said.room < 1 << 63 and 0 < said.required_dst_info_num <= MAX_PEERS
    return 0 < said.decode_tp_size <= MAX_PEERS and 0 <= said.decode_tp_rank < said.decode_tp_size


def room_of(message: Sequence[bytes]) -> int | None:
    """The room that a message which is not foreign asks for; None for one that asks for none."""
    if message[0] != GUARD or message[1] == REGISTRATION:
        return None
    return int(message[1])


class ScreenedSocket:
    """SGLang's control socket; ``recv_multipart`` gives what is not foreign. One thread reads."""

    def __init__(self, socket: Any, is_foreign: Callable[[Sequence[bytes]], bool], dropped: Callable[[], None]) -> None:
        self._socket = socket
        self._is_foreign = is_foreign
        self._dropped = dropped
        self._has_warned = False

    def recv_multipart(self, *args: Any, **kwargs: Any) -> list[bytes]:
        while self._is_foreign(message := self._socket.recv_multipart(*args, **kwargs)):
            self._dropped()
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "banyan: dropped a message at the hand-over's control port that no decode server sends (more are "
                    "only counted: foreign_hand_over_messages in /server_info)"
                )
        return list(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
