# SPDX-License-Identifier: Apache-2.0
"""Opened pools of peers: opened ahead and on another thread, once each, none closed while in use, and nothing believed
that does not fit."""

import ctypes
from types import SimpleNamespace

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc import opening
from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Segment, describe
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.places import OWN_ROW, PlaceTable

STREAM = 1
PEER, OTHER, HOST, OWN = (0, 2), (1, 2), (3, 2), 7


class Rig:
    def __init__(self, num_peers=2):
        self.gpu = FakeGpu()
        self.driver = FakeDriver(self.gpu)
        self.places = PlaceTable(self.driver, stream=STREAM, num_peers=num_peers, num_extents=2)
        self.described = {PEER: self.pool()}
        self.mapped = {}
        announcements = SimpleNamespace(
            description=lambda slot, epoch: self.described.get((slot, epoch)),
            mapping=lambda slot, epoch: self.mapped.get((slot, epoch)),
        )
        self.mappings = PeerMappings(
            driver=self.driver,
            places=self.places,
            page_bytes=(8, 16),
            alignment_bytes=8,
            announcements=announcements,
            own_rows={OWN: OWN_ROW},
            wanted_slots=[0, 1, 3, OWN],
            executor=self.gpu.opener,
        )

    def pool(self, num_pages=4):
        extents = [(self.gpu.allocate(num_pages * size), num_pages * size) for size in (8, 16)]
        return describe(self.driver, bytes(16), extents).encode()

    def meet(self, *present):
        """These peers are there, and the other thread and the device have done what that takes."""
        self.mappings.attend(present)
        self.gpu.opener.run()
        self.mappings.poll()
        self.gpu.run()
        self.mappings.poll()


@pytest.fixture
def rig():
    return Rig()


def test_peer_when_it_is_being_opened_then_not_reachable_and_nobody_waits_for_it(rig):
    rig.mappings.attend([PEER])
    rig.mappings.poll()
    assert rig.mappings.reachable([0, OWN]) == [OWN] and rig.mappings.acquire(PEER, 0) is None
    rig.gpu.opener.run()
    rig.mappings.poll()
    rig.mappings.attend([PEER])
    assert rig.mappings.reachable([0]) == [], "its row has not reached the device"
    before = rig.mappings.version
    rig.gpu.run()
    rig.mappings.poll()
    assert rig.mappings.reachable([0]) == [0] and rig.mappings.version != before
    assert rig.mappings.acquire(PEER, 3) is not None
    assert not rig.driver.slow_calls


def test_attend_when_repeated_then_the_handles_are_opened_once(rig):
    rig.meet(PEER)
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, 3) == rig.mappings.acquire(PEER, 0)
    assert rig.driver.names().count("open_handle") == 2


def test_attend_when_nobody_wants_the_slot_then_nothing_is_opened(rig):
    rig.described[5, 2] = rig.pool()
    rig.meet((5, 2))
    assert "open_handle" not in rig.driver.names() and rig.mappings.reachable([5]) == []


def test_attend_when_the_peer_is_in_use_then_it_is_closed_with_the_last_release(rig):
    rig.meet(PEER)
    rig.mappings.acquire(PEER, 0)
    rig.mappings.acquire(PEER, 0)
    rig.mappings.attend([])
    assert rig.mappings.acquire(PEER, 0) is None, "a leaving peer takes no new users"
    assert rig.mappings.reachable([0]) == []
    rig.mappings.release(PEER)
    assert rig.driver.mapped
    rig.mappings.release(PEER)
    assert not rig.driver.mapped and len(rig.mappings._open) == 0


def test_peer_when_it_leaves_before_or_after_it_was_opened_then_nothing_stays_open(rig):
    rig.mappings.attend([PEER])
    rig.mappings.attend([])
    rig.gpu.opener.run()
    rig.mappings.poll()
    assert "open_handle" not in rig.driver.names(), "given up before it began"
    rig.mappings.attend([PEER])
    rig.gpu.opener.run()
    rig.mappings.attend([])
    rig.mappings.poll()
    assert not rig.driver.mapped and len(rig.mappings._open) == 0
    rig.meet(PEER)
    assert rig.mappings.reachable([0]) == [0], "it was given up, not barred"


def test_close_when_a_peer_is_being_opened_then_it_is_closed_as_well(rig):
    rig.mappings.attend([PEER])
    rig.gpu.opener.run()
    rig.mappings.close()
    assert not rig.driver.mapped


def test_row_when_its_peer_is_closed_then_the_next_one_gets_it(rig):
    rig.meet(PEER)
    row = rig.mappings.acquire(PEER, 0)
    rig.mappings.release(PEER)
    rig.described[OTHER] = rig.pool()
    rig.meet(OTHER)
    assert rig.mappings.acquire(OTHER, 0) == row


@pytest.mark.parametrize(
    "damaged",
    [
        b"nothing",
        PoolDescription(bytes(16), (Segment(bytes(64), 32),), (PlacedExtent(0, 0, 32),)).encode(),
        PoolDescription(
            bytes(16), (Segment(b"?" * 64, 96),), (PlacedExtent(0, 0, 32), PlacedExtent(0, 32, 64))
        ).encode(),
    ],
    ids=["no description", "another number of extents", "a handle that does not open"],
)
def test_peer_when_the_description_is_bad_then_barred_and_nothing_stays_open(rig, damaged, caplog):
    rig.described[PEER] = damaged
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, 0) is None and rig.mappings.reachable([0]) == []
    num_calls = len(rig.driver.calls)
    rig.meet(PEER)
    assert len(rig.driver.calls) == num_calls and not rig.driver.mapped
    assert caplog.text.count("slot 0") == 1


def test_peer_when_the_second_handle_fails_then_the_first_is_closed(rig):
    rig.driver.refuse["open_handle"] = 1
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, 0) is None
    assert not rig.driver.mapped


def test_acquire_when_the_pool_has_no_such_page_then_none(rig):
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, 4) is None
    assert rig.mappings.acquire(PEER, 3) is not None


def test_peer_when_there_are_more_than_rows_then_not_reachable():
    rig = Rig(num_peers=1)
    rig.described[OTHER] = rig.pool()
    rig.meet(PEER, OTHER)
    assert rig.mappings.reachable([0, 1]) == [0] and len(rig.driver.mapped) == 2


def test_peer_when_closing_is_refused_then_it_is_said_and_the_peer_is_gone(rig, caplog):
    rig.meet(PEER)
    rig.driver.refuse["close_handle"] = 0
    rig.mappings.attend([])
    assert len(rig.mappings._open) == 0 and "could not be closed" in caplog.text


def test_acquire_when_the_peer_is_this_process_then_its_own_row_and_nothing_is_opened(rig):
    rig.meet((OWN, 2))
    assert rig.mappings.acquire((OWN, 2), 0) == OWN_ROW
    rig.mappings.release((OWN, 2))
    assert "open_handle" not in rig.driver.names()


def host_memory(rig, *, num_frames, frame_bytes=32):
    address = rig.gpu.allocate(num_frames * frame_bytes)
    rig.kept = rig.gpu.memory.pop(address)
    return SimpleNamespace(
        address=address, num_bytes=num_frames * frame_bytes, extents=[(0, frame_bytes), (8, frame_bytes)]
    )


def test_peer_when_it_is_host_memory_then_it_is_registered_until_it_leaves(rig):
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    row = rig.mappings.acquire(HOST, 3)
    table = (ctypes.c_int64 * 4).from_address(rig.places.address + row * 4 * 8)
    assert list(table) == [memory.address, memory.address + 8, 32, 32]
    assert rig.mappings.acquire(HOST, 4) is None, "no such frame"
    rig.mappings.release(HOST)
    rig.mappings.attend([])
    assert rig.driver.calls[-1] == ("unregister_host", memory.address)


def test_host_memory_when_it_is_large_then_registered_in_pieces_and_all_of_them_let_go(rig, monkeypatch):
    assert opening.PIECE_BYTES <= 1 << 30, "a quarter of a second"
    monkeypatch.setattr(opening, "PIECE_BYTES", 48)
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    pieces = [call[1:] for call in rig.driver.calls if call[0] == "register_host"]
    assert pieces == [(memory.address, 48), (memory.address + 48, 48), (memory.address + 96, 32)]
    assert rig.mappings.acquire(HOST, 3) is not None and not rig.driver.slow_calls
    rig.mappings.release(HOST)
    rig.mappings.attend([])
    assert sum(call[0] == "unregister_host" for call in rig.driver.calls) == 3


def test_host_memory_when_its_peer_leaves_between_two_pieces_then_what_was_registered_is_let_go(rig, monkeypatch):
    monkeypatch.setattr(opening, "PIECE_BYTES", 48)
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    original = rig.driver.register_host

    def leave_meanwhile(address, num_bytes):
        rig.mappings.attend([])
        return original(address, num_bytes)

    rig.driver.register_host = leave_meanwhile
    rig.meet(HOST)
    names = rig.driver.names()
    assert names.count("register_host") == names.count("unregister_host") == 1


def test_host_memory_when_the_device_sees_its_pieces_apart_then_barred_and_let_go(rig, monkeypatch, caplog):
    monkeypatch.setattr(opening, "PIECE_BYTES", 64)
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    original = rig.driver.register_host
    rig.driver.register_host = lambda address, num_bytes: 2 * original(address, num_bytes)
    rig.meet(HOST)
    assert "not adjacent" in caplog.text and rig.mappings.reachable([3]) == []
    assert rig.driver.names().count("unregister_host") == 2


def test_peer_when_pages_lie_between_the_words_that_the_kernel_moves_then_barred(rig, caplog):
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    memory.extents[1] = (12, 32)
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, 0) is None
    assert "not aligned to 8 bytes" in caplog.text
    assert ("unregister_host", memory.address) in rig.driver.calls


def test_peer_when_host_memory_cannot_be_registered_then_barred(rig, caplog):
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.driver.refuse["register_host"] = 0
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, 0) is None
    assert "slot 3" in caplog.text
