# SPDX-License-Identifier: Apache-2.0
"""Opened pools of peers: one opening for each, none closed while in use, and nothing believed that does not fit."""

import ctypes
from types import SimpleNamespace

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Segment, describe
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.places import OWN_ROW, PlaceTable

STREAM = 1
PEER = (0, 2)


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
            own_rows={7: OWN_ROW},
        )

    def pool(self, num_pages=4):
        extents = [(self.gpu.allocate(num_pages * size), num_pages * size) for size in (8, 16)]
        return describe(self.driver, bytes(16), extents).encode()


@pytest.fixture
def rig():
    return Rig()


def test_acquire_when_asked_twice_then_the_handles_are_opened_once(rig):
    assert rig.mappings.acquire(PEER, 3) == rig.mappings.acquire(PEER, 0)
    assert rig.driver.names().count("open_handle") == 2


def test_keep_when_the_peer_is_in_use_then_it_is_closed_with_the_last_release(rig):
    rig.mappings.acquire(PEER, 0)
    rig.mappings.acquire(PEER, 0)
    rig.mappings.keep([])
    assert rig.mappings.acquire(PEER, 0) is None, "a leaving peer takes no new users"
    rig.mappings.release(PEER)
    assert rig.driver.mapped
    rig.mappings.release(PEER)
    assert not rig.driver.mapped and rig.mappings.num_open == 0


def test_row_when_its_peer_is_closed_then_the_next_one_gets_it(rig):
    row = rig.mappings.acquire(PEER, 0)
    rig.mappings.release(PEER)
    rig.mappings.keep([])
    rig.described[1, 2] = rig.pool()
    assert rig.mappings.acquire((1, 2), 0) == row


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
def test_acquire_when_the_description_is_bad_then_the_peer_is_barred_and_nothing_stays_open(rig, damaged, caplog):
    rig.described[PEER] = damaged
    assert rig.mappings.acquire(PEER, 0) is None
    num_calls = len(rig.driver.calls)
    assert rig.mappings.acquire(PEER, 0) is None
    assert len(rig.driver.calls) == num_calls and not rig.driver.mapped
    assert "slot 0" in caplog.text


def test_acquire_when_the_second_handle_fails_then_the_first_is_closed(rig):
    rig.driver.refuse["open_handle"] = 1
    assert rig.mappings.acquire(PEER, 0) is None
    assert not rig.driver.mapped


def test_acquire_when_the_pool_has_no_such_page_then_none(rig):
    assert rig.mappings.acquire(PEER, 4) is None
    assert rig.mappings.acquire(PEER, 3) is not None


def test_acquire_when_there_are_more_peers_than_rows_then_none():
    rig = Rig(num_peers=1)
    rig.described[1, 2] = rig.pool()
    assert rig.mappings.acquire(PEER, 0) is not None
    assert rig.mappings.acquire((1, 2), 0) is None


def test_keep_when_closing_is_refused_then_it_is_said_and_the_peer_is_gone(rig, caplog):
    rig.mappings.acquire(PEER, 0)
    rig.mappings.release(PEER)
    rig.driver.refuse["close_handle"] = 0
    rig.mappings.keep([])
    assert rig.mappings.num_open == 0 and "could not be closed" in caplog.text


def test_acquire_when_the_peer_is_this_process_then_its_own_row_and_nothing_is_opened(rig):
    assert rig.mappings.acquire((7, 2), 0) == OWN_ROW
    rig.mappings.release((7, 2))
    assert "open_handle" not in rig.driver.names()


def host_memory(rig, *, num_frames, frame_bytes=32):
    address = rig.gpu.allocate(num_frames * frame_bytes)
    rig.kept = rig.gpu.memory.pop(address)
    return SimpleNamespace(
        address=address, num_bytes=num_frames * frame_bytes, extents=[(0, frame_bytes), (8, frame_bytes)]
    )


def test_acquire_when_the_peer_is_host_memory_then_it_is_registered_until_it_leaves(rig):
    rig.mapped[3, 2] = memory = host_memory(rig, num_frames=4)
    row = rig.mappings.acquire((3, 2), 3)
    rig.gpu.run()
    table = (ctypes.c_int64 * 4).from_address(rig.places.address + row * 4 * 8)
    assert list(table) == [memory.address, memory.address + 8, 32, 32]
    assert rig.mappings.acquire((3, 2), 4) is None, "no such frame"
    rig.mappings.release((3, 2))
    rig.mappings.keep([])
    assert rig.driver.calls[-1] == ("unregister_host", memory.address)


def test_acquire_when_pages_lie_between_the_words_that_the_kernel_moves_then_barred(rig, caplog):
    rig.mapped[3, 2] = memory = host_memory(rig, num_frames=4)
    memory.extents[1] = (12, 32)
    assert rig.mappings.acquire((3, 2), 0) is None
    assert "not aligned to 8 bytes" in caplog.text
    assert rig.driver.calls[-1] == ("unregister_host", memory.address)


def test_acquire_when_host_memory_cannot_be_registered_then_barred(rig, caplog):
    rig.mapped[3, 2] = host_memory(rig, num_frames=4)
    rig.driver.refuse["register_host"] = 0
    assert rig.mappings.acquire((3, 2), 0) is None
    assert "slot 3" in caplog.text
