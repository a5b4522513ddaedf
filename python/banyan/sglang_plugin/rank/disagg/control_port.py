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
    if tag != GUARD or not rest:
        return True
    try:
        # SGLang's own reading of it, which raises where a part is missing or is not what it should be.
        (KVArgsRegisterInfo if rest[0] == REGISTRATION else TransferInfo).from_zmq(list(rest))
    except (ValueError, IndexError, KeyError, struct.error):
        return True
    return False


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
