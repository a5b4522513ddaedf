# SPDX-License-Identifier: Apache-2.0
"""What two nodes say to each other: the only place that knows the form of a message. Pure.

A message is one typed msgpack value. A borrower sends `Ask`, `Read`, `Borrow` and `Return`; a page server answers
`Answer`, `Reading`, `RemoteLease` or `Refused`. One who can read the pages where they lie sends `BorrowToRead`, and is
answered by `ReadableLease` where that can be. Who examines the path sends `Probe`, which is answered as `Borrow` is.
Whatever else arrives raises `Foreign`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from banyan.decoding import decoded

_Message = TypeVar("_Message")

NAMESPACE_BYTES = 32
KEY_BYTES = 32
TOKEN_BYTES = 16
SUM_BYTES = 8

MAX_PAGES = 4096
"""In one message: at 16 tokens a page, a prompt of 65,536 tokens."""

PLACE_BYTES = 8
MAX_AGENT_BYTES = 64 << 10
"""Of what an agent of NIXL says of itself: hundreds of bytes, and some for each part of the arena."""

MAX_BACKEND = 32
MAX_REASON = 500

MAX_PROBE_BYTES = 64 << 20
"""As long as a fast path needs to be at its rate."""

MAX_MESSAGE_BYTES = 8 << 20
"""To a borrower: the sums of `MAX_PAGES` pages of 256 layers."""

MAX_QUESTION_BYTES = MAX_PAGES * KEY_BYTES + 1024
"""To a page server."""


class Foreign(ValueError):
    """A message that no node sends."""


class Ask(msgspec.Struct, tag="ask", array_like=True, forbid_unknown_fields=True, frozen=True):
    """How many leading pages of ``keys`` are there? None: whether anybody is."""

    number: int
    namespace: bytes
    keys: bytes


class Read(msgspec.Struct, tag="read", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Bring ``keys`` from your store into your arena. `Answer` follows when they are there, until then `Reading`."""

    number: int
    namespace: bytes
    keys: bytes


class Borrow(msgspec.Struct, tag="borrow", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Lend all pages of ``keys``."""

    number: int
    namespace: bytes
    keys: bytes


class BorrowToRead(Borrow, tag="borrow_to_read", array_like=True, forbid_unknown_fields=True, frozen=True):
    """As `Borrow`, from one that can read them where they lie, by NIXL with this ``backend``."""

    backend: str


class Return(msgspec.Struct, tag="return", array_like=True, forbid_unknown_fields=True, frozen=True):
    """The pages of a remote lease have been read, or are not wanted any more."""

    token: bytes


class Probe(msgspec.Struct, tag="probe", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Lend so many bytes that mean nothing: what does the path carry?"""

    number: int
    num_bytes: int


class Answer(msgspec.Struct, tag="answer", array_like=True, forbid_unknown_fields=True, frozen=True):
    """``num_pages`` leading pages are there now. A hint."""

    number: int
    num_pages: int


class Reading(msgspec.Struct, tag="reading", array_like=True, forbid_unknown_fields=True, frozen=True):
    """The pages that were wanted by `Read` are on their way."""

    number: int


class RemoteLease(msgspec.Struct, tag="remote_lease", array_like=True, forbid_unknown_fields=True, frozen=True):
    """The pages stay where they are for a while: whoever shows ``token`` at ``port`` reads them.

    ``sums``: the checksum of each page in each layer, layer by layer, as little-endian words; none for `Probe`.
    """

    number: int
    token: bytes
    port: int
    sums: bytes


class ReadableLease(RemoteLease, tag="readable_lease", array_like=True, forbid_unknown_fields=True, frozen=True):
    """As `RemoteLease`; the pages may as well be read where they lie: each begins at its one of ``places``, which are
    little-endian words, in the memory of NIXL's agent that ``agent`` describes."""

    agent: bytes
    places: bytes


class Refused(msgspec.Struct, tag="refused", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Not lent, and why."""

    number: int
    reason: str


ToPageServer = Ask | Read | Borrow | BorrowToRead | Return | Probe
ToBorrower = Answer | Reading | RemoteLease | ReadableLease | Refused

_encoder = msgspec.msgpack.Encoder()
_to_page_server = msgspec.msgpack.Decoder(ToPageServer)
_to_borrower = msgspec.msgpack.Decoder(ToBorrower)


def encode(message: ToPageServer | ToBorrower) -> bytes:
    return _encoder.encode(message)


def read_by_page_server(payload: bytes) -> ToPageServer:
    """
    Raises:
        Foreign: for anything else than a message to a page server.
    """
    message = _decoded(_to_page_server, payload)
    if isinstance(message, Return):
        _check(len(message.token) == TOKEN_BYTES, "a token of another length")
    elif isinstance(message, Probe):
        _check(0 < message.num_bytes <= MAX_PROBE_BYTES, f"a probe of {message.num_bytes} bytes")
    else:
        _check(len(message.namespace) == NAMESPACE_BYTES, "a namespace of another length")
        _check(len(message.keys) % KEY_BYTES == 0, "a part of a key")
        _check(len(message.keys) <= MAX_PAGES * KEY_BYTES, f"more than {MAX_PAGES} pages")
        _check(isinstance(message, Ask) or bool(message.keys), "a remote lease or a read of nothing")
        _check(_are_distinct(message.keys), "a page twice")
        _check(not isinstance(message, BorrowToRead) or len(message.backend) <= MAX_BACKEND, "no backend")
    return message


def read_by_borrower(payload: bytes) -> ToBorrower:
    """
    Raises:
        Foreign: for anything else than a message to a borrower.
    """
    message = _decoded(_to_borrower, payload)
    if isinstance(message, Answer):
        _check(0 <= message.num_pages <= MAX_PAGES, "an impossible number of pages")
    elif isinstance(message, RemoteLease):
        _check(len(message.token) == TOKEN_BYTES, "a token of another length")
        _check(0 < message.port < 65536, "no port")
        _check(len(message.sums) % SUM_BYTES == 0, "a part of a checksum")
        if isinstance(message, ReadableLease):
            _check(0 < len(message.agent) <= MAX_AGENT_BYTES, "an agent of more than it takes")
            _check(len(message.places) % PLACE_BYTES == 0, "a part of a place")
    elif isinstance(message, Refused):
        _check(len(message.reason) <= MAX_REASON, "a reason of more than anybody reads")
    return message


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise Foreign(f"{len(payload)} bytes")
    try:
        return decoded(decoder, payload)
    except msgspec.DecodeError as error:
        raise Foreign(str(error)) from error


def _check(is_well: bool, what_it_is: str) -> None:
    if not is_well:
        raise Foreign(what_it_is)


def _are_distinct(packed: bytes) -> bool:
    starts = range(0, len(packed), KEY_BYTES)
    return len({packed[start : start + KEY_BYTES] for start in starts}) == len(starts)


def pack_keys(keys: Sequence[str]) -> bytes:
    return bytes.fromhex("".join(keys))


def unpack_keys(packed: bytes) -> list[str]:
    text = packed.hex()
    return [text[start : start + 2 * KEY_BYTES] for start in range(0, len(text), 2 * KEY_BYTES)]


def pack_sums(layers: Sequence[Sequence[int]]) -> bytes:
    """``layers[layer][page]``."""
    return b"".join(array("Q", layer).tobytes() for layer in layers)


def unpack_sums(packed: bytes, *, num_pages: int, num_layers: int) -> list[list[int]]:
    """
    Raises:
        Foreign: when they are not so many.
    """
    _check(len(packed) == num_pages * num_layers * SUM_BYTES, "checksums of another number of pages or layers")
    words = array("Q", packed).tolist()
    return [words[start : start + num_pages] for start in range(0, len(words), num_pages)]
