# SPDX-License-Identifier: Apache-2.0
"""A decode server's control socket, without the messages that no prefill server sends.

One of SGLang's threads reads it for all requests of a rank. Over Mooncake it ends at a request for staging that it
cannot read, and copies what comes as metadata to whatever address the message's numbers make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_ACK_TAG

from banyan.features.pairs.rank.control_port import MAX_STAGING_CHUNKS

AUX_DATA = b"AUX_DATA"
"""Metadata of a request, where Mooncake does not write it itself. Which way is the prefill server's setting alone."""

STATUSES = (KVPoll.Failed, KVPoll.WaitingForInput, KVPoll.Success)
MAX_FRAMES = 7
MAX_SAID_BYTES = 64 << 10
"""Of all that is not metadata: a reason is kept and logged."""

MAX_NUMBER = 1 << 63


def is_of_prefill_server(message: Sequence[bytes], manager: Any) -> bool:
    """Whether a prefill server says so to ``manager``, a decode server's of SGLang."""
    tag, *rest = message
    if len(message) > MAX_FRAMES or (tag != AUX_DATA and sum(map(len, message)) > MAX_SAID_BYTES):
        return False
    is_known = KINDS.get(tag)
    if is_known is not None:
        return is_known(rest, manager)
    if manager.kv_status_msg_tag is None:
        return _is_status(message)
    return tag == manager.kv_status_msg_tag and _is_status(rest)


def _numbers(frames: Sequence[bytes], least: int) -> list[int]:
    """What they are read as; none where there are fewer than ``least``, or one is no number of SGLang's."""
    try:
        read = [int(frame.decode("ascii")) for frame in frames]
    except ValueError:
        return []
    return read if len(read) >= least and all(0 <= number < MAX_NUMBER for number in read) else []


def _is_status(said: Sequence[bytes]) -> bool:
    read = _numbers(said[:3], 3)
    return bool(read) and len(said) <= 4 and read[1] in STATUSES


def _is_acknowledgement(said: Sequence[bytes], manager: Any) -> bool:
    return len(said) <= 3 and bool(_numbers(said, 1))


def _is_chunk_of_staging(said: Sequence[bytes], manager: Any) -> bool:
    return len(said) == 6 and _is_of_staging(said[:4], 4, manager)


def _asks_for_staging(said: Sequence[bytes], manager: Any) -> bool:
    # Behind its numbers stands the name of who asks, and then perhaps another number.
    return len(said) in (4, 5) and said[3].isascii() and _is_of_staging([*said[:3], *said[4:]], 3, manager)


def _is_of_staging(numbers: Sequence[bytes], least: int, manager: Any) -> bool:
    read = _numbers(numbers, least)
    is_on = manager.enable_staging and getattr(manager, "_staging_handler", None) is not None
    return is_on and bool(read) and read[0] in manager.request_status and read[1] < MAX_STAGING_CHUNKS


def _is_metadata(said: Sequence[bytes], manager: Any) -> bool:
    """Whether it is one item of one of the buffers, whole, in a room that is open."""
    read = _numbers(said[:3], 3)
    if len(said) != 5 or not read or read[0] not in manager.request_status:
        return False
    _, buffer, place = read
    lens, item_lens = manager.kv_args.aux_data_lens, manager.kv_args.aux_item_lens
    if buffer >= len(item_lens) or (place + 1) * item_lens[buffer] > lens[buffer]:
        return False
    return len(said[4]) == item_lens[buffer] and said[3] == len(said[4]).to_bytes(4, "big")


KINDS: Mapping[bytes, Callable[[Sequence[bytes], Any], bool]] = {
    ABORT_ACK_TAG: _is_acknowledgement,
    b"CHUNK_READY": _is_chunk_of_staging,
    b"STAGING_REQ": _asks_for_staging,
    AUX_DATA: _is_metadata,
}
