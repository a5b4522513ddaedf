# SPDX-License-Identifier: Apache-2.0
"""Opened pools of peers: opened ahead and on another thread, once each, none closed while in use, and nothing believed
that does not fit."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan.transport.cuda_ipc import host_pieces, mappings
from banyan.transport.cuda_ipc.description import PlacedExtent, PoolDescription, Probe, Segment, describe
from banyan.transport.cuda_ipc.host_pieces import KEEP_S, KeptPieces, Pinned
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
        self.registrations = KeptPieces(self.driver, Pinned())
        self.mappings = self.make_mappings()

    def make_mappings(self):
        """As each time that a rank joins a namespace."""
        announcements = SimpleNamespace(
            description=lambda slot, epoch: self.described.get((slot, epoch)),
            mapping=lambda slot, epoch: self.mapped.get((slot, epoch)),
        )
        return PeerMappings(
            driver=self.driver,
            places=self.places,
            page_bytes=(8, 16),
            alignment_bytes=8,
            announcements=announcements,
            own_rows={OWN: OWN_ROW},
            wanted_slots=[0, 1, 3, OWN],
            executor=self.gpu.opener,
            registrations=self.registrations,
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
def rig(monkeypatch):
    # How long a call takes here says nothing.
    monkeypatch.setattr(host_pieces, "RESTS", 0)
    monkeypatch.setattr(host_pieces, "AHEAD_PIECES", 0)
    return Rig()


def test_peer_when_it_is_being_opened_then_not_reachable_and_nobody_waits_for_it(rig):
    rig.mappings.attend([PEER])
    rig.mappings.poll()
    assert rig.mappings.reachable([0, OWN]) == [OWN] and rig.mappings.acquire(PEER, [0]) is None
    rig.gpu.opener.run()
    rig.mappings.poll()
    rig.mappings.attend([PEER])
    assert rig.mappings.reachable([0]) == [], "its row has not reached the device"
    before = rig.mappings.version
    rig.gpu.run()
    rig.mappings.poll()
    assert rig.mappings.reachable([0]) == [0] and rig.mappings.version != before
    assert rig.mappings.acquire(PEER, [3]) is not None
    assert not rig.driver.slow_calls


def test_attend_when_repeated_then_the_handles_are_opened_once(rig):
    rig.meet(PEER)
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, [3]) == rig.mappings.acquire(PEER, [0])
    assert rig.driver.names().count("open_handle") == 2


def test_attend_when_nobody_wants_the_slot_then_nothing_is_opened(rig):
    rig.described[5, 2] = rig.pool()
    rig.meet((5, 2))
    assert "open_handle" not in rig.driver.names() and rig.mappings.reachable([5]) == []


def test_attend_when_the_peer_is_in_use_then_it_is_closed_with_the_last_release(rig):
    rig.meet(PEER)
    rig.mappings.acquire(PEER, [0])
    rig.mappings.acquire(PEER, [0])
    rig.mappings.attend([])
    assert rig.mappings.acquire(PEER, [0]) is None, "a leaving peer takes no new users"
    assert rig.mappings.reachable([0]) == []
    rig.mappings.release(PEER)
    rig.gpu.opener.run()
    assert rig.driver.mapped
    rig.mappings.release(PEER)
    assert rig.driver.mapped, "the scheduler closes nothing"
    rig.gpu.opener.run()
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
    rig.gpu.opener.run()
    assert not rig.driver.mapped and len(rig.mappings._open) == 0
    rig.meet(PEER)
    assert rig.mappings.reachable([0]) == [0], "it was given up, not barred"


def test_close_when_a_peer_is_being_opened_then_it_is_closed_as_well(rig):
    rig.mappings.attend([PEER])
    rig.mappings.close()
    rig.gpu.opener.run()
    assert not rig.driver.mapped


def test_row_when_its_peer_is_closed_then_the_next_one_gets_it(rig):
    rig.meet(PEER)
    row = rig.mappings.acquire(PEER, [0])
    rig.mappings.release(PEER)
    rig.described[OTHER] = rig.pool()
    rig.meet(OTHER)
    assert rig.mappings.acquire(OTHER, [0]) == row


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
    assert rig.mappings.acquire(PEER, [0]) is None and rig.mappings.reachable([0]) == []
    num_calls = len(rig.driver.calls)
    rig.meet(PEER)
    assert len(rig.driver.calls) == num_calls and not rig.driver.mapped
    assert caplog.text.count("slot 0") == 1


@pytest.mark.parametrize("num_there", [0, 1], ids=["the first", "the second"])
def test_peer_when_it_announces_more_than_lies_behind_a_handle_then_barred_and_nothing_stays_open(
    rig, num_there, caplog
):
    told = PoolDescription.decode(rig.described[PEER])
    segments = list(told.segments)
    segments[num_there] = replace(segments[num_there], num_bytes=segments[num_there].num_bytes + 1)
    rig.described[PEER] = replace(told, segments=tuple(segments)).encode()
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, [0]) is None and rig.mappings.reachable([0]) == []
    rig.meet(PEER)
    assert not rig.driver.mapped and rig.driver.names().count("open_handle") == num_there + 1
    assert caplog.text.count("are announced") == 1


@pytest.mark.parametrize(
    ("offset_bytes", "num_bytes", "reason"), [(0, 8, "has 8 bytes, of 16"), (4, 16, "not aligned to 8 bytes")]
)
def test_peer_when_its_probe_cannot_be_read_whole_then_barred_before_the_kernel_reads_it(
    rig, offset_bytes, num_bytes, reason, caplog
):
    rig.mappings._prober = SimpleNamespace(num_bytes=16, is_busy=False, begin=lambda address: pytest.fail("it is read"))
    told = PoolDescription.decode(rig.described[PEER])
    rig.described[PEER] = replace(told, probe=Probe(bytes(16), PlacedExtent(0, offset_bytes, num_bytes))).encode()
    rig.meet(PEER)
    rig.gpu.opener.run()
    assert reason in caplog.text and rig.mappings.reachable([0]) == [] and not rig.driver.mapped


def test_peer_when_the_second_handle_fails_then_the_first_is_closed(rig):
    rig.driver.refuse["open_handle"] = 1
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, [0]) is None
    assert not rig.driver.mapped


def test_acquire_when_the_pool_has_no_such_page_then_none(rig):
    rig.meet(PEER)
    assert rig.mappings.acquire(PEER, [4]) is None
    assert rig.mappings.acquire(PEER, [3]) is not None


def test_peer_when_there_are_more_than_rows_then_not_reachable():
    rig = Rig(num_peers=1)
    rig.described[OTHER] = rig.pool()
    rig.meet(PEER, OTHER)
    rig.gpu.opener.run()
    assert rig.mappings.reachable([0, 1]) == [0] and len(rig.driver.mapped) == 2


def test_peer_when_closing_is_refused_then_it_is_said_and_the_peer_is_gone(rig, caplog):
    rig.meet(PEER)
    rig.driver.refuse["close_handle"] = 0
    rig.mappings.attend([])
    rig.gpu.opener.run()
    assert len(rig.mappings._open) == 0 and "could not be closed" in caplog.text


def test_acquire_when_the_peer_is_this_process_then_its_own_row_and_nothing_is_opened(rig):
    rig.meet((OWN, 2))
    assert rig.mappings.acquire((OWN, 2), [0]) == OWN_ROW
    rig.mappings.release((OWN, 2))
    assert "open_handle" not in rig.driver.names()


IDENTITY = (1, 7)


def host_memory(rig, *, num_frames, frame_bytes=32, identity=IDENTITY):
    address = rig.gpu.allocate(num_frames * frame_bytes)
    rig.kept = rig.gpu.memory.pop(address)
    return SimpleNamespace(
        address=address,
        num_bytes=num_frames * frame_bytes,
        extents=[(0, frame_bytes), (8, frame_bytes)],
        identity=identity,
    )


def registered(rig):
    return [call[1:] for call in rig.driver.calls if call[0] == "register_host"]


def sweep_later(rig, monkeypatch):
    """What nobody has used for long is let go."""
    now_s = host_pieces.time.monotonic()
    monkeypatch.setattr(host_pieces.time, "monotonic", lambda: now_s + 2 * KEEP_S)
    rig.mappings.attend([])
    rig.gpu.opener.run()


def test_peer_when_it_is_host_memory_then_it_is_registered_until_long_after_it_left(rig, monkeypatch):
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    row = rig.mappings.acquire(HOST, [3])
    table = (ctypes.c_int64 * 4).from_address(rig.places.address + row * 4 * 8)
    assert list(table) == [memory.address, memory.address + 8, 32, 32]
    assert rig.mappings.acquire(HOST, [4]) is None, "no such frame"
    rig.mappings.release(HOST)
    rig.mappings.attend([])
    rig.gpu.opener.run()
    assert "unregister_host" not in rig.driver.names(), "it may be announced again"
    sweep_later(rig, monkeypatch)
    assert rig.driver.calls[-1] == ("unregister_host", memory.address) and not rig.driver.slow_calls


def test_host_memory_when_it_is_announced_under_other_weights_then_it_is_not_registered_again(rig):
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    rig.mappings.close()
    again = HOST[0], HOST[1] + 1
    rig.mapped[again] = SimpleNamespace(**{**vars(rig.mapped[HOST]), "address": 1 << 40})
    rig.mappings = rig.make_mappings()
    rig.meet(again)
    assert rig.mappings.acquire(again, [3]) is not None
    assert len(registered(rig)) == 1 and "unregister_host" not in rig.driver.names()


def test_host_memory_when_a_rank_comes_back_with_other_memory_then_it_is_registered(rig):
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    again = HOST[0], HOST[1] + 1
    rig.mapped[again] = host_memory(rig, num_frames=4, identity=(1, 8))
    rig.meet(again)
    assert len(registered(rig)) == 2


def test_host_memory_when_it_is_large_then_each_piece_is_registered_when_a_page_of_it_is_wanted(
    rig, monkeypatch, caplog
):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 48)
    caplog.set_level("INFO")
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    assert registered(rig) == [(memory.address, 48)], "that it can be done"
    assert rig.mappings.acquire(HOST, [0]) is not None
    assert rig.mappings.acquire(HOST, [0, 1]) is None, "frame 1 reaches into the next piece"
    assert rig.mappings.acquire(HOST, [1]) is None
    assert len(registered(rig)) == 1, "nobody waits for it"
    rig.gpu.opener.run()
    assert registered(rig)[1:] == [(memory.address + 48, 48)]
    assert rig.mappings.acquire(HOST, [0, 1, 2]) is not None
    assert rig.mappings.acquire(HOST, [3]) is None
    rig.gpu.opener.run()
    assert registered(rig)[2:] == [(memory.address + 96, 32)] and rig.mappings.acquire(HOST, [3]) is not None
    assert not rig.driver.slow_calls and caplog.text.count("pinned") == 2, "the first and the last"
    for _ in range(3):
        rig.mappings.release(HOST)
    rig.mappings.attend([])
    rig.gpu.opener.run()
    sweep_later(rig, monkeypatch)
    assert rig.driver.names().count("unregister_host") == 3


def test_host_memory_when_a_later_piece_is_refused_then_only_its_pages_are_not_had(rig, monkeypatch, caplog):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.driver.refuse["register_host"] = 1
    rig.meet(HOST)
    for _ in range(2):
        assert rig.mappings.acquire(HOST, [2]) is None
        rig.gpu.opener.run()
    assert rig.mappings.acquire(HOST, [0, 1]) is not None
    assert len(registered(rig)) == 2 and caplog.text.count("are not shared") == 1


def test_pieces_when_one_took_long_then_others_have_the_driver_several_times_as_long_before_the_next(monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(host_pieces, "AHEAD_PIECES", 0)
    rig, clock = Rig(), SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(host_pieces.time, "monotonic", lambda: clock.now_s)
    original = rig.driver.register_host

    def take_long(address, num_bytes):
        clock.now_s += 2
        return original(address, num_bytes)

    rig.driver.register_host = take_long
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=8)
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, [7, 3]) is None
    for now_s, pieces in ((102.0, [0]), (109.9, [0]), (110.0, [0, 1]), (119.9, [0, 1]), (120.0, [0, 1, 3])):
        clock.now_s = now_s
        rig.mappings.poll()
        rig.gpu.opener.run()
        assert registered(rig) == [(memory.address + 64 * piece, 64) for piece in pieces]
    assert rig.mappings.acquire(HOST, [7, 3]) is not None


def test_pieces_when_one_is_wanted_then_those_behind_it_are_registered_before_anybody_wants_them(rig, monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(host_pieces, "AHEAD_PIECES", 2)
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=12)
    rig.meet(HOST)

    def pieces():
        for _ in range(4):
            rig.gpu.opener.run()
            rig.mappings.poll()
        return [(address - memory.address) // 64 for address, _ in registered(rig)]

    assert rig.mappings.acquire(HOST, [1]) is not None and pieces() == [0, 1, 2]
    assert rig.mappings.acquire(HOST, [11]) is None and rig.mappings.acquire(HOST, [5]) is not None
    assert pieces() == [0, 1, 2, 5, 3, 4], "what is wanted goes first, and the last has none behind it"
    assert all(rig.mappings.acquire(HOST, [frame]) is not None for frame in range(12))


def test_pieces_when_their_peer_has_left_before_their_turn_then_its_memory_is_left_alone(rig, monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    rig.mapped[HOST] = host_memory(rig, num_frames=8)
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, [7, 3]) is None
    rig.mappings.attend([])
    for _ in range(3):
        rig.gpu.opener.run()
        rig.mappings.poll()
    assert len(registered(rig)) == 2, "the second was under way"


def test_piece_when_one_is_refused_then_no_other_of_that_memory_is_tried_until_later(rig, monkeypatch, caplog):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    rig.mapped[HOST] = host_memory(rig, num_frames=32)
    rig.meet(HOST)
    rig.driver.refuse["register_host"] = 0
    for _ in range(3):
        assert rig.mappings.acquire(HOST, range(32)) is None
        rig.gpu.opener.run()
    assert len(registered(rig)) == 2 and caplog.text.count("are not shared") == 1


def test_frame_when_it_is_longer_than_a_piece_then_the_device_has_to_know_all_of_it(rig, monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=2, frame_bytes=256)
    memory.extents[1] = (240, 256)
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, [0]) is None
    for _ in range(3):
        rig.gpu.opener.run()
        assert rig.mappings.acquire(HOST, [0]) is None or len(registered(rig)) == 4
    assert len(registered(rig)) == 4 and rig.mappings.acquire(HOST, [0]) is not None


def test_host_memory_when_its_peer_leaves_before_it_is_opened_then_nothing_is_registered(rig):
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.mappings.attend([HOST])
    rig.mappings.attend([])
    rig.gpu.opener.run()
    assert registered(rig) == []


def test_host_memory_when_the_device_sees_a_piece_apart_then_it_is_let_go_and_its_pages_are_not_had(
    rig, monkeypatch, caplog
):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    original = rig.driver.register_host
    rig.driver.register_host = lambda address, num_bytes: 2 * original(address, num_bytes)
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, [2]) is None
    rig.gpu.opener.run()
    assert rig.mappings.acquire(HOST, [2]) is None and "not adjacent" in caplog.text
    assert rig.driver.calls[-1] == ("unregister_host", memory.address + 64)


def test_pinning_when_it_takes_memory_of_the_device_then_it_is_counted_and_said(rig, caplog):
    caplog.set_level("INFO")
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    original, pinned = rig.driver.register_host, rig.registrations._pinned

    def take_page_tables(address, num_bytes):
        rig.gpu.free_bytes -= 5 << 20
        return original(address, num_bytes)

    rig.driver.register_host = take_page_tables
    rig.meet(HOST)
    assert (pinned.num_bytes, pinned.device_bytes) == (128, 5 << 20)
    assert "took 5 MiB of the device" in caplog.text


def test_host_memory_when_the_device_is_nearly_full_then_no_more_of_it_is_registered(rig, monkeypatch, caplog):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.meet(HOST)
    rig.gpu.free_bytes = (256 << 20) - 1
    assert rig.mappings.acquire(HOST, [2]) is None
    rig.gpu.opener.run()
    assert len(registered(rig)) == 1 and rig.mappings.acquire(HOST, [2]) is None
    assert "less than 256 MiB of the device are free" in caplog.text
    assert rig.mappings.acquire(HOST, [0, 1]) is not None
    rig.gpu.free_bytes = 256 << 20
    now_s = mappings.time.monotonic()
    monkeypatch.setattr(mappings.time, "monotonic", lambda: now_s + mappings.RETRY_S)
    assert rig.mappings.acquire(HOST, [2]) is None
    rig.gpu.opener.run()
    assert rig.mappings.acquire(HOST, [2]) is not None


def test_peer_when_pages_lie_between_the_words_that_the_kernel_moves_then_barred(rig, caplog):
    rig.mapped[HOST] = memory = host_memory(rig, num_frames=4)
    memory.extents[1] = (12, 32)
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, [0]) is None
    assert "not aligned to 8 bytes" in caplog.text


def test_peer_when_host_memory_cannot_be_registered_then_barred(rig, caplog):
    rig.mapped[HOST] = host_memory(rig, num_frames=4)
    rig.driver.refuse["register_host"] = 0
    rig.meet(HOST)
    assert rig.mappings.acquire(HOST, [0]) is None
    assert "slot 3" in caplog.text
