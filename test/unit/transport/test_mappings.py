# SPDX-License-Identifier: Apache-2.0
"""Opened pools of peers: one opening for each, none closed while in use, and nothing believed that does not fit."""

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Segment, describe
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.places import PlaceTable

STREAM = 1
PEER = (0, 2)


class Rig:
    def __init__(self, num_peers=2):
        self.gpu = FakeGpu()
        self.driver = FakeDriver(self.gpu)
        self.places = PlaceTable(self.driver, stream=STREAM, num_peers=num_peers, num_extents=2)
        self.described = {PEER: self.pool()}
        self.mappings = PeerMappings(
            ipc=self.driver,
            places=self.places,
            strides=(8, 16),
            description=lambda slot, epoch: self.described.get((slot, epoch)),
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
