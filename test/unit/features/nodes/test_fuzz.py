# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives at a page server, at a borrower or at a lender's port: it is read, or dropped, and nothing is kept
of it.

Longer: `pytest test/unit/features/nodes/test_fuzz.py --hypothesis-profile=long`.
"""

from __future__ import annotations

import socket
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test.unit.features.nodes.rig import until

from banyan.features.nodes.callers import Callers
from banyan.features.nodes.lending import Lending
from banyan.features.nodes.wire import (
    KEY_BYTES,
    MAX_PAGES,
    MAX_REASON,
    NAMESPACE_BYTES,
    TOKEN_BYTES,
    Answer,
    Ask,
    Borrow,
    BorrowToRead,
    Foreign,
    Probe,
    Read,
    ReadableLease,
    Refused,
    RemoteLease,
    Return,
    encode,
    read_by_borrower,
    read_by_page_server,
    unpack_keys,
    unpack_sums,
)
from banyan.telemetry import start_thread

NUMBERS = st.integers(-(2**63), 2**64 - 1)
NAMESPACES = st.binary(min_size=NAMESPACE_BYTES, max_size=NAMESPACE_BYTES) | st.binary(max_size=40)
KEYS = st.binary(max_size=3 * KEY_BYTES) | st.integers(0, 3).map(lambda number: b"k" * KEY_BYTES * number)
MESSAGES = st.one_of(
    *(st.builds(kind, NUMBERS, NAMESPACES, KEYS) for kind in (Ask, Read, Borrow)),
    st.builds(BorrowToRead, NUMBERS, NAMESPACES, KEYS, st.text(max_size=40)),
    st.builds(Return, st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES) | st.binary(max_size=20)),
    st.builds(Answer, NUMBERS, NUMBERS),
    st.builds(Probe, NUMBERS, NUMBERS),
    st.builds(RemoteLease, NUMBERS, st.binary(max_size=20), NUMBERS, st.binary(max_size=40)),
    st.builds(ReadableLease, NUMBERS, st.binary(max_size=20), NUMBERS, *(st.binary(max_size=40),) * 3),
    st.builds(Refused, NUMBERS, st.text(max_size=2 * MAX_REASON)),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.binary(max_size=40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def changed(whole: bytes, at: int, piece: bytes) -> bytes:
    at %= len(whole) + 1
    return whole[:at] + piece + whole[at + len(piece) :]


PAYLOADS = st.one_of(
    st.binary(max_size=200),
    MESSAGES.map(encode),
    st.builds(changed, MESSAGES.map(encode), st.integers(0), st.binary(max_size=3)),
    VALUES.map(msgspec.msgpack.encode),
    st.builds(
        lambda tag, rest: msgspec.msgpack.encode([tag, *rest]),
        st.sampled_from(["ask", "remote_lease", "readable_lease", "borrow_to_read", "probe"]),
        st.lists(VALUES),
    ),
)


@given(PAYLOADS)
def test_message_when_it_is_anything_then_a_page_server_reads_it_or_drops_it_and_lends_no_page(payload):
    lending = Lending(max_pages=8, clock=time.monotonic)
    try:
        message = read_by_page_server(payload)
    except Foreign:
        return
    if isinstance(message, Read):
        assert len(unpack_keys(message.keys)) <= MAX_PAGES
        return
    answer = (lending.borrow if isinstance(message, Borrow) else lending.answer)(message, port=1)
    expected = type(None) if isinstance(message, Return) else RemoteLease if isinstance(message, Probe) else Refused
    assert isinstance(answer, expected)
    if answer is not None:
        encode(answer)
    assert lending.remote_leases.num_pages == 0
    assert lending.remote_leases.num_remote_leases == isinstance(answer, RemoteLease)


@given(PAYLOADS)
def test_message_when_it_is_anything_then_a_borrower_reads_it_or_drops_it(payload):
    try:
        message = read_by_borrower(payload)
    except Foreign:
        return
    if isinstance(message, Refused):
        assert len(message.reason) <= MAX_REASON
    if isinstance(message, RemoteLease):
        with pytest.raises(Foreign):
            unpack_sums(message.sums, num_pages=100, num_layers=100)


@pytest.fixture(scope="module")
def port():
    listener = socket.create_server(("127.0.0.1", 0))
    callers = Callers(listener, lambda connection, token: connection.close())
    thread = start_thread(callers.run, name="test-callers", feature="a test")
    yield callers, thread, listener.getsockname()[1]
    callers.close()
    thread.join(5)
    listener.close()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=4), st.booleans())
def test_port_when_it_is_sent_anything_then_it_goes_on_listening_and_keeps_nobody(port, pieces, resets):
    callers, thread, number = port
    with socket.create_connection(("127.0.0.1", number), timeout=5) as connection:
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        for piece in pieces:
            try:
                connection.sendall(piece)
            except ConnectionError:
                break
    until(lambda: not callers._callers)
    assert thread.is_alive() and callers._num_of == {}
