# SPDX-License-Identifier: Apache-2.0
"""How a request is brought to a pair of servers, and what their answers say of it.

Both get the same body with a *room*, a number under which they find each other. A room serves one attempt: once it has
failed it stays failed on both sides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from banyan.decoding import with_last_fields

ROOM_BITS = 62

MOST_ERROR_BYTES = 64 << 10
"""Of an event that says so: one of megabytes is an answer, and all others would wait while it is read."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the two servers of one attempt meet: the prefill server's bootstrap address, and the room."""

    host: str
    port: int
    room: int


def choose_room(random_bits: int, *, num_ranks: int, rank: int | None) -> int:
    """A room from ``ROOM_BITS`` random bits.

    A stock prefill server sends a request to rank ``room % num_ranks``; ``rank`` is the one that it should be.
    """
    room = random_bits % (1 << ROOM_BITS)
    if rank is not None:
        room += rank - room % num_ranks
    # Health checks have room 0.
    return room or num_ranks


def address(body: bytes, rendezvous: Rendezvous) -> bytes:
    """The body of a request with its rendezvous as the last fields: of two equal names the last counts. A body that is
    no object is the servers' to refuse."""
    return with_last_fields(
        body,
        {
            "bootstrap_host": rendezvous.host,
            "bootstrap_port": rendezvous.port,
            "bootstrap_room": rendezvous.room,
        },
    )


def broken_with(status: int, first: bytes, *, is_stream: bool) -> int:
    """The status with which an answer says that the hand-over failed, or the server did, before the first token; 0
    where it does not.

    ``first``: the first events of a stream.
    """
    if not is_stream:
        return _servers_fault(status)
    event = first.partition(b"\n")[0]
    if len(event) > MOST_ERROR_BYTES:
        return 0
    try:
        said = json.loads(event.removeprefix(b"data:"))
    except (ValueError, RecursionError):
        return 0
    if not isinstance(said, dict):
        return 0
    meta = said.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return _servers_fault(reason.get("status_code"))
    error = said.get("error")
    return _servers_fault(error.get("code")) if isinstance(error, dict) else 0


def _servers_fault(code: object) -> int:
    return code if isinstance(code, int) and code >= 500 else 0
