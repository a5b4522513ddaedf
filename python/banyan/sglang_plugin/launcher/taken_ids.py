# SPDX-License-Identifier: Apache-2.0
"""Ids of requests that are under way, where several processes answer HTTP (``--tokenizer-worker-num``), and rooms of
pairs; with sharing and without.

Of two requests with one id SGLang refuses the second, but each of these processes knows its own only. The detokenizer,
which is one for all of them, knows requests by nothing else: it makes one text of the tokens of both, and it ends when
both are over in one step. Then the server answers nobody any more.

Of two requests in one room a rank ends, or the second waits for ever; SGLang does not compare rooms at all.

Invariants
  1. An id is under way at one process at a time, for as long as SGLang knows the request there. A room is one id's.
  2. It is free again when its process ends, however that comes: it is a lock on one byte, at the id's digest, of a file
     that all processes of the server have.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import struct
from functools import cache
from typing import Any

from sglang.srt.runtime_context import get_server_args

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest

LOOK_PERIOD_S = 0.5
"""For requests whose client has gone: SGLang knows them until their rank has ended them."""

MAX_ROOM = 1 << 63

_taken: set[str] = set()
_rooms: set[int] = set()
_room_of: dict[str, int] = {}
_is_looking = False


@cache
def make_file() -> str:
    """Where all processes of the server lock: their ancestor makes it."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('banyan-taken')}"


def take(rid: Any, manager: Any) -> None:
    """A request with this id is under way here from now on.

    Raises:
        BadRequest: where it is at another process.
    """
    if not (runtime.is_front() or runtime.is_of_a_pair()) or not isinstance(rid, str) or rid in _taken:
        return
    try:
        _lock(fcntl.F_WRLCK, _place("rid", rid))
    except BlockingIOError:
        raise BadRequest(f"rid: a request {rid[:64]!r} is under way: use another id, or none") from None
    _taken.add(rid)
    _look_later(manager)


def take_room(room: Any, rid: Any) -> None:
    """The request with this id, which is taken, meets its other half in this room.

    Raises:
        BadRequest: where another one does, or there is no such room.
    """
    if room is None or rid not in _taken or _room_of.get(rid) == room:
        return
    # To SGLang `true` is room 1.
    if type(room) is not int or not 0 <= room < MAX_ROOM:
        raise BadRequest("bootstrap_room: a number of 63 bits")
    try:
        if room in _rooms:
            raise BlockingIOError
        _lock(fcntl.F_WRLCK, _place("room", room))
    except BlockingIOError:
        raise BadRequest(f"bootstrap_room: a request is under way in {room}: leave it to the router") from None
    _rooms.add(room)
    _room_of[rid] = room


def _place(kind: str, name: str | int) -> int:
    """Whatever a client calls its request, it is no room's."""
    name_bytes, person = str(name).encode(errors="surrogatepass"), kind.encode()
    return int.from_bytes(hashlib.blake2b(name_bytes, digest_size=8, person=person).digest()) >> 2


def let_go(rids: Any, manager: Any) -> None:
    """Of these, one or a list, whatever a client has said, those that SGLang does not know any more."""
    for rid in rids if isinstance(rids, list) else [rids]:
        if isinstance(rid, str) and rid in _taken and rid not in manager.rid_to_state:
            _taken.remove(rid)
            _lock(fcntl.F_UNLCK, _place("rid", rid))
            if rid in _room_of:
                _rooms.remove(room := _room_of.pop(rid))
                _lock(fcntl.F_UNLCK, _place("room", room))


def _look_later(manager: Any) -> None:
    global _is_looking
    if not _is_looking:
        _is_looking = True
        asyncio.get_running_loop().call_later(LOOK_PERIOD_S, _look, manager)


def _look(manager: Any) -> None:
    global _is_looking
    _is_looking = False
    let_go(list(_taken), manager)
    if _taken:
        _look_later(manager)


def _lock(kind: int, place: int) -> None:
    # Of an open file, and not of a process: another one that closes the same file lets nothing go.
    fcntl.fcntl(_file(_path()), fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0))


def _path() -> str:
    carried = runtime.bookkeeping(get_server_args())
    assert carried is not None
    return str(carried["taken"])


@cache
def _file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
