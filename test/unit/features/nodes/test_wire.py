# SPDX-License-Identifier: Apache-2.0
import pytest
from test.unit.directory.rig import NAMESPACE, keys

from banyan.features.nodes import wire
from banyan.features.nodes.wire import (
    Answer,
    Ask,
    Borrow,
    BorrowToRead,
    Foreign,
    Read,
    ReadableLease,
    Reading,
    Refused,
    RemoteLease,
    Return,
)

TO_PAGE_SERVER = [
    Ask(1, NAMESPACE, b""),
    Ask(2, NAMESPACE, wire.pack_keys(keys(1, 2))),
    Borrow(3, NAMESPACE, wire.pack_keys(keys(1))),
    Read(4, NAMESPACE, wire.pack_keys(keys(1, 2, 3))),
    BorrowToRead(5, NAMESPACE, wire.pack_keys(keys(1)), "UCX"),
    Return(b"t" * 16),
]
TO_BORROWER = [
    Answer(1, 4),
    Reading(4),
    RemoteLease(2, b"t" * 16, 7400, wire.pack_sums([[1, 2]])),
    ReadableLease(2, b"t" * 16, 7400, wire.pack_sums([[1, 2]]), b"an agent", bytes(16)),
    Refused(3, "gone"),
]
FOREIGN = [
    b"",
    b"GET / HTTP/1.1",
    b"\x95\xa4\xd6oan\x01\xc4\x10t",  # a tag that is no text
    wire.encode(Ask(1, b"short", b"")),
    wire.encode(Ask(1, NAMESPACE, b"part of a key")),
    wire.encode(Ask(1, NAMESPACE, bytes(32 * (wire.MAX_PAGES + 1)))),
    wire.encode(Borrow(1, NAMESPACE, b"")),
    wire.encode(Read(1, NAMESPACE, b"")),
    wire.encode(Read(1, NAMESPACE, bytes(32 * (wire.MAX_PAGES + 1)))),
    wire.encode(Read(1, NAMESPACE, bytes(64))),
    wire.encode(Return(b"short")),
    wire.encode(Answer(1, -1)),
    wire.encode(RemoteLease(1, b"t" * 16, 0, b"")),
    wire.encode(RemoteLease(1, b"t" * 16, 7400, b"odd")),
    wire.encode(BorrowToRead(1, NAMESPACE, b"", "UCX")),
    wire.encode(BorrowToRead(1, NAMESPACE, bytes(32), "U" * (wire.MAX_BACKEND + 1))),
    wire.encode(ReadableLease(1, b"t" * 16, 7400, b"", b"", b"")),
    wire.encode(ReadableLease(1, b"t" * 16, 7400, b"", bytes(wire.MAX_AGENT_BYTES + 1), b"")),
    wire.encode(ReadableLease(1, b"t" * 16, 7400, b"", b"an agent", b"odd")),
    wire.encode(ReadableLease(1, b"t" * 16, 0, b"", b"an agent", b"")),
    bytes(wire.MAX_MESSAGE_BYTES + 1),
]


@pytest.mark.parametrize("message", TO_PAGE_SERVER)
def test_message_when_sent_to_a_page_server_then_it_arrives_and_no_borrower_takes_it(message):
    assert wire.read_by_page_server(wire.encode(message)) == message
    with pytest.raises(Foreign):
        wire.read_by_borrower(wire.encode(message))


@pytest.mark.parametrize("message", TO_BORROWER)
def test_message_when_sent_to_a_borrower_then_it_arrives_and_no_page_server_takes_it(message):
    assert wire.read_by_borrower(wire.encode(message)) == message
    with pytest.raises(Foreign):
        wire.read_by_page_server(wire.encode(message))


@pytest.mark.parametrize("payload", FOREIGN, ids=range(len(FOREIGN)))
def test_message_when_no_node_would_send_it_then_foreign(payload):
    for reader in (wire.read_by_page_server, wire.read_by_borrower):
        with pytest.raises(Foreign):
            reader(payload)


def test_keys_and_sums_when_packed_then_they_come_out_again():
    assert wire.unpack_keys(wire.pack_keys(keys(1, 2, 3))) == keys(1, 2, 3)
    sums = [[1, 2**64 - 1, 3], [4, 5, 6]]
    assert wire.unpack_sums(wire.pack_sums(sums), num_pages=3, num_layers=2) == sums
    with pytest.raises(Foreign):
        wire.unpack_sums(wire.pack_sums(sums), num_pages=2, num_layers=2)
