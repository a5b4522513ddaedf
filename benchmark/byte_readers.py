# SPDX-License-Identifier: Apache-2.0
"""What of Banyan's reads bytes of somebody else's, with some that are valid: what `benchmark.byte_fuzz` changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from banyan.arena.index_file import HEADER, HEADER_BYTES, MAGIC, IndexFile
from banyan.decoding import json_of
from banyan.features.nodes import wire
from banyan.features.pairs.rendezvous import Rendezvous, address, broken_with
from banyan.layout.file_digests import recalled
from banyan.planner import asked
from banyan.router import prompt
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import RankBlocks
from banyan.router.description import Description, read_loads
from banyan.router.dropped_lines import DroppedLines
from banyan.router.events import EventFeed, read_batch, read_number
from banyan.router.load_feed import LoadStat, read_load
from banyan.router.paths import BY_PATH, By
from banyan.router.verdict import TooLong, WholeEvents
from banyan.routing.conversation import conversation_of
from banyan.routing.hint import TEXT, PrefixHint, ReadHint, SourceHint
from banyan.routing.question import asked_about
from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Probe, Segment

NAMESPACE = bytes(range(32))
MOST_BLOCKS = 64
NUM_FRAMES = 16
FRAMES = b"\x1e"
"""Between the frames of a message of several."""
LINE = re.compile("now:|^$")
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be short\nnow: 12:00"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "stream": True,
    "prompt_cache_key": "key",
    "metadata": {"user_id": "u", "session_id": "s"},
}
BODIES: tuple[Mapping[str, Any], ...] = (
    CHAT,
    {"model": "m", "system": [{"type": "text", "text": "be\nshort"}], "messages": CHAT["messages"], "max_tokens": 7},
    {"model": "m", "instructions": "be short", "input": CHAT["messages"], "conversation": {"id": "c"}},
    {"input_ids": list(range(40)), "sampling_params": {"n": 2}, "session_id": "s", "cache_salt": "t", "lora_path": "l"},
    {"text": ["one", "two"], "routed_dp_rank": 1, "bootstrap_host": "h", "bootstrap_room": 7, "extra_key": "k"},
    {"prompt": [[1, 2, 3], [4, 5]], "session_params": {"id": "s"}, "stream": False},
    {"prompt": "", "banyan_path": "/v1/messages", "banyan_request": CHAT},
    {"banyan_path": "/api/chat", "banyan_request": {"model": "m", "messages": []}, "reason": "cache"},
    {
        "dp_max_kv_len": 64,
        "dp_max_kv_rank": 1,
        "policy": "lmetric",
        "reason": "cache",
        "num_hot_ranks": 0,
        "dispatch_us": 5,
    },
    {"action": "move", "text": "a:1 3"},
)
LOAD = {
    **{"dp_rank": 0, "timestamp": 1.0, "num_running_reqs": 1, "num_waiting_reqs": 0, "num_total_tokens": 5},
    **{"num_waiting_uncached_tokens": 2, "max_total_num_tokens": 100, "num_used_tokens": 7},
}
SERVER = {
    "dp_size": 2,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
    "startup_time": 1.0,
    "kv_events": {
        "publisher": "zmq",
        "dp_size": 2,
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 5558,
        "block_size": 16,
        "topic": "",
    },
    "load_topic": "load",
    "internal_states": [
        {"banyan": {"page_server": {"address": "a:1", "most_read_tokens": 7}, "nodes": [], "store": "s"}}
    ],
    "loads": [LOAD],
    "timestamp": "2026-01-01T00:00:00",
}


@dataclass(frozen=True, slots=True)
class Reader:
    """``read`` takes any bytes; ``refusals`` is all that it may raise. ``seeds`` are read without."""

    name: str
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


def readers() -> list[Reader]:
    """Those that need no SGLang."""
    refused = msgspec.DecodeError
    bodies, headers = [_json(body) for body in BODIES], {"x-session-id": "s"}
    return [
        *(Reader(f"body {path}", partial(read_body, path, headers=headers), (), bodies) for path in _read_paths()),
        Reader("fields", _fields, (refused,), bodies),
        Reader("header", lambda payload: read_text(payload.decode("latin-1")), (), [b"a:1 5", b"a:1,[::1]:2", b"none"]),
        Reader("description", _description, (refused,), [_json(SERVER)]),
        Reader(
            "stream",
            _stream,
            (TooLong,),
            [b'data: {"meta_info":{}}\n\ndata: [DONE]\n\n', b"event: x\r\ndata: y\r\n\r\n"],
        ),
        Reader("events", _Events().read, (refused, ValueError), _batches()),
        Reader("load", lambda payload: read_load(payload, 0.0), (refused,), _loads()),
        Reader("page server", wire.read_by_page_server, (wire.Foreign,), _questions()),
        Reader("borrower", _borrower, (wire.Foreign,), _answers()),
        Reader("pool description", PoolDescription.decode, (ValueError,), _descriptions()),
        Reader("digests", _digests, (), [_json({"a": ["00", "ab" * 32], "b": ["", "cd" * 32]}), b"{}"]),
        Reader("kept arena", _kept, (), [_index_file()]),
    ]


def of_pairs() -> list[Reader]:
    """Those that are SGLang's own beside ours: what decode servers send to prefill servers."""
    from banyan.features.pairs.rank import by_mooncake, by_nixl

    pages, pool = array("i", [1, 2]).tobytes(), array("Q", [4096]).tobytes()
    there = (b"10.0.0.2", b"4242")
    (guard,) = by_nixl.MESSAGES.guard
    nixl = (
        (guard, b"7", *there, b"agent", pages, b"0", b"1", b"", b"0", b"0"),
        (guard, b"None", *there, b"agent", b"metadata", b"", b"", b"", b"0", b"1", b"0", b"64"),
    )
    mooncake = (
        (b"7", *there, b"a:1", pages, b"0", b"", b"1", b"0", b""),
        (b"None", *there, b"a:1", pool, b"", b"", b"0", b"1", b"64", *(b"",) * 6, b"1", b"0", b"", b""),
    )
    return [
        Reader(f"hand-over by {name}", partial(_read_frames, messages.read), (), [FRAMES.join(one) for one in seeds])
        for name, messages, seeds in (("NIXL", by_nixl.MESSAGES, nixl), ("Mooncake", by_mooncake.MESSAGES, mooncake))
    ]


def _read_frames(read: Callable[[Sequence[bytes]], object], payload: bytes) -> None:
    read(payload.split(FRAMES))


def _read_paths() -> list[str]:
    """Those whose requests a router reads."""
    return [path for path, row in sorted(BY_PATH.items()) if row.by not in (By.LOAD, By.NOTHING)]


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def read_body(path: str, body: bytes, headers: Mapping[str, str]) -> None:
    """A request that a router gets: it is placed and passed on."""
    read = prompt.read(path, body, headers)
    known = Asked(read, read.token_ids)
    assert known.num_tokens >= 0 and len(known.pieces) * 256 <= len(read.row() or b"")
    if read.token_ids is not None:
        known.names(4)
    if read.tokenize is not None:
        msgspec.json.encode(read.tokenize)
    without = DroppedLines(LINE).without(BY_PATH[path], body)
    if read.may_pin:
        # What was a body is one.
        pinned = prompt.pin(body, 1)
        assert len(pinned) > len(body)
        json_of(pinned)
        json_of(without)
    address(body, Rendezvous("host", 1, 2))
    broken_with(200, body, is_stream=True)


def _fields(body: bytes) -> None:
    """What a request's fields say to a server's processes."""
    fields = json_of(body)
    if not isinstance(fields, dict):
        return
    conversation_of(fields, {})
    asked_about(fields)
    asked.from_payload(fields)
    hint = PrefixHint.from_payload(fields)
    assert hint is None or PrefixHint.from_payload(hint.payload()) == hint
    read_text(fields.get(TEXT))


def read_text(value: object) -> None:
    """What a router says to a server and the server to its ranks: it is read as it was written, or not ours."""
    for kind in (ReadHint, SourceHint):
        hint = kind.read(value)
        assert hint is None or kind.read(hint.text()) == hint


def read_description(said: Mapping[str, Any]) -> None:
    """What a server says of itself, and of its loads: each is read or refused."""
    with contextlib.suppress(ValueError):
        description = Description.read(said, "http://a:1")
        assert len(description.sources) <= 4096 and 0 < description.num_ranks <= 4096
    with contextlib.suppress(ValueError):
        read_loads(said, 0.0)


def _description(payload: bytes) -> None:
    said = json_of(payload)
    if isinstance(said, dict):
        read_description(said)


def read_stream(chunks: Sequence[bytes], *, max_bytes: int) -> None:
    """An answer in pieces: all of it is passed on.

    Raises:
        TooLong: for an event of more than ``max_bytes``.
    """
    events, whole, passed = WholeEvents(max_bytes), b"".join(chunks), b""
    for chunk in chunks:
        passed += events.feed(chunk)
        assert whole.startswith(passed)
    assert passed + events.close() == whole


def _stream(payload: bytes) -> None:
    read_stream([payload[at : at + 7] for at in range(0, len(payload), 7)], max_bytes=4096)


class _Events:
    """One rank's feed, which lives through all inputs."""

    def __init__(self) -> None:
        self._feed = EventFeed(RankBlocks(most_stored=MOST_BLOCKS, most_blocks=MOST_BLOCKS))

    def read(self, payload: bytes) -> None:
        batch, number = read_batch(payload[8:]), read_number(payload[:8])
        self._feed.first_missing(number, batch)
        self._feed.apply(number, batch)
        assert len(self._feed.blocks) <= MOST_BLOCKS


def _batches() -> list[bytes]:
    stored = {"type": "BlockStored", "block_hashes": [1, 2, -3], "medium": "GPU", "token_ids": [1]}
    removed = {"type": "BlockRemoved", "block_hashes": [2], "medium": None}
    events = [[stored], [removed, stored], [{"type": "AllBlocksCleared"}]]
    return [bytes(7) + bytes([seq]) + msgspec.msgpack.encode([1.0, batch, 0]) for seq, batch in enumerate(events)]


def _loads() -> list[bytes]:
    return [msgspec.msgpack.encode(LoadStat(1, 2, 3, 100, 1, 5, 6, 7, 8, 9))]


def _questions() -> list[bytes]:
    keys, token = b"k" * wire.KEY_BYTES + b"l" * wire.KEY_BYTES, b"t" * wire.TOKEN_BYTES
    asks = [kind(1, NAMESPACE, keys) for kind in (wire.Ask, wire.Read, wire.Borrow)]
    asks.append(wire.BorrowToRead(1, NAMESPACE, keys, "UCX"))
    return [wire.encode(message) for message in (*asks, wire.Return(token), wire.Probe(1, 1 << 20))]


def _answers() -> list[bytes]:
    token = b"t" * wire.TOKEN_BYTES
    leases = (wire.RemoteLease(1, token, 9, bytes(32)), wire.ReadableLease(1, token, 9, bytes(32), b"agent", bytes(16)))
    answers = (wire.Answer(1, 2), wire.Reading(1), *leases, wire.Refused(1, "why"))
    return [wire.encode(message) for message in answers]


def _borrower(payload: bytes) -> None:
    message = wire.read_by_borrower(payload)
    if isinstance(message, wire.RemoteLease):
        wire.unpack_sums(message.sums, num_pages=2, num_layers=2)


def _descriptions() -> list[bytes]:
    segments, extents = (Segment(bytes(64), 1 << 20),), (PlacedExtent(0, 0, 4096), PlacedExtent(0, 8192, 4096))
    probed = PoolDescription(bytes(16), segments, extents, Probe(bytes(16), PlacedExtent(0, 64, 64)))
    return [PoolDescription(bytes(16), segments, extents).encode(), probed.encode()]


def _digests(payload: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.flush()
        for known in recalled(file.fileno()).values():
            assert len(bytes.fromhex(known.digest)) == 32


def _index_file() -> bytes:
    memory = bytearray(IndexFile.num_bytes(NUM_FRAMES))
    HEADER.pack_into(memory, 0, MAGIC, NAMESPACE, 4096, NUM_FRAMES)
    file = IndexFile(memoryview(memory), page_bytes=4096, num_frames=NUM_FRAMES)
    file.entries(NAMESPACE)
    file.enter([1, 5], ["ab" * 32, "cd" * 32], [7, 9])
    # Nearly all of the header's room says nothing.
    return bytes(memory[: HEADER.size]) + bytes(memory[HEADER_BYTES:])


def _kept(payload: bytes) -> None:
    memory = bytearray(IndexFile.num_bytes(NUM_FRAMES))
    table = payload[HEADER.size :][: len(memory) - HEADER_BYTES]
    memory[: HEADER.size] = payload[: HEADER.size].ljust(HEADER.size, b"\0")
    memory[HEADER_BYTES : HEADER_BYTES + len(table)] = table
    file = IndexFile(memoryview(memory), page_bytes=4096, num_frames=NUM_FRAMES)
    found = file.entries(NAMESPACE)
    assert all(0 <= entry.frame < NUM_FRAMES for entry in found)
    file.enter([0], [os.urandom(32).hex()], [1])
    assert file.entries(NAMESPACE)[-1].frame == 0
