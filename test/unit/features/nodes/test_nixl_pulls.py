# SPDX-License-Identifier: Apache-2.0
"""Pulls by NIXL, as far as they are decided here: with a stand-in for its process."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from banyan.core import Address
from banyan.features.nodes import nixl_pulls
from banyan.features.nodes.carriers import MOST_DOUBLINGS, NUM_FAILED, PAUSE_S, Carriers
from banyan.features.nodes.nixl_pulls import LentByNixl, NixlCarrier
from banyan.features.nodes.pull import Ended
from banyan.features.nodes.tcp import STALL_S, TcpCarrier
from banyan.features.nodes.wire import Borrow, BorrowToRead, Foreign, ReadableLease, RemoteLease
from banyan.transport.nixl.process import LOOK_S, Declined, StillWriting
from benchmark import nixl_faults

NODES = [Address("127.0.0.1", 1), Address("127.0.0.1", 2)]
SOURCE = Address("there", 1)
TOKEN = b"t" * 16
TARGET = SimpleNamespace(offsets=[0, 4096], layer_bytes=[1024, 3072])
PLACES = array("Q", [1 << 20, 1 << 21]).tobytes()


def lease(places: bytes = PLACES) -> ReadableLease:
    return ReadableLease(1, TOKEN, 1, b"", b"an agent", places)


class Channel:
    """Says what it is to say; then nothing."""

    def __init__(self, *said: Any) -> None:
        self.said = list(said)
        self.has_ended = False
        self.now_s = 0.0

    def carry(self, *asked: Any) -> Channel:
        self.asked = asked
        return self

    def num_landed(self) -> int | None:
        if not self.said:
            self.now_s += LOOK_S
            return None
        one = self.said.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    def end(self) -> None:
        self.has_ended = True

    def pull(self, places: bytes = PLACES, **named: Any) -> list[int]:
        carrier = NixlCarrier(lambda: self, lease(places), clock=lambda: self.now_s)
        return list(carrier.pull(SOURCE, TOKEN, TARGET, 2, **named))


def test_layers_when_several_land_at_once_then_each_is_told() -> None:
    channel = Channel(2)
    assert channel.pull() == [0, 1] and channel.has_ended
    assert channel.asked == (b"an agent", PLACES, array("Q", [0, 4096]).tobytes(), [1024, 3072])


def test_pull_when_no_byte_comes_then_it_is_given_up_in_time() -> None:
    channel = Channel(0, 1)
    with pytest.raises(TimeoutError):
        channel.pull()
    assert STALL_S <= channel.now_s <= STALL_S + LOOK_S and channel.has_ended


def test_pull_when_its_process_dies_or_nobody_wants_it_then_it_ends() -> None:
    for channel, wanted in ((Channel(ConnectionError("gone")), True), (Channel(2), False)):
        with pytest.raises(OSError):
            channel.pull(is_wanted=lambda wanted=wanted: wanted)
        assert channel.has_ended


def test_pull_when_who_follows_it_stops_then_its_channel_is_ended() -> None:
    channel = Channel(2)
    pull = NixlCarrier(lambda: channel, lease()).pull(SOURCE, TOKEN, TARGET, 2)
    next(pull)
    pull.close()
    assert channel.has_ended


def test_pull_when_there_is_no_process_then_nothing_is_asked_for() -> None:
    with pytest.raises(ConnectionError):
        list(NixlCarrier(lambda: None, lease()).pull(SOURCE, TOKEN, TARGET, 2))


@pytest.mark.parametrize(
    "places", [[1], [1, 2, 3], [1, 2**64 - 1], [1, 2**63 - 100], []], ids=["few", "many", "last", "end", "none"]
)
def test_places_when_they_cannot_be_then_nothing_is_asked_for(places) -> None:
    channel = Channel(2)
    with pytest.raises(Foreign):
        channel.pull(array("Q", places).tobytes())
    assert not hasattr(channel, "asked")


def test_faults_when_drawn_then_no_wrong_byte_is_good_and_no_frame_is_written_late() -> None:
    ends = nixl_faults.run(12 * len(nixl_faults.FAULTS), seed=1)["ends"]
    for fault in ("a bit", "another page", "nothing written", "overwritten later", "layers too soon"):
        assert set(ends[fault]) == {"damaged"}, fault
    for fault in ("error", "process dies", "foreign message", "places of other memory", "places that are too few"):
        assert set(ends[fault]) == {"lost"}, fault
    assert set(ends["stands still, and does not die"]) == {"lost"}
    assert set(ends["none"]) == {"whole"}


def test_faults_when_a_pull_does_not_wait_for_its_process_then_it_is_found(monkeypatch) -> None:
    """The search finds what it is to find."""
    monkeypatch.setattr(nixl_faults.FakeProcess, "end", lambda self: self._reading.stop())
    with pytest.raises(nixl_faults.Violation, match="after its read had ended"):
        nixl_faults.run(4 * len(nixl_faults.FAULTS), seed=1)


def test_still_writing_when_its_process_dies_at_last_then_that_is_told() -> None:
    ended: list[int] = []
    process = SimpleNamespace(popen=SimpleNamespace(wait=lambda: ended.append(1)))
    told: list[list[int]] = []
    StillWriting(process).when_over(lambda: told.append(list(ended)))
    while not told:
        pass
    assert told == [[1]], "and not before"


class Reader:
    backend, num_carried, num_started = "UCX", 3, 1

    def __init__(self, is_ready: bool) -> None:
        self.is_ready = is_ready

    def carrier(self, remote_lease: ReadableLease) -> str:
        return "by nixl"


def test_carriers_when_a_node_can_be_read_then_it_is_asked_so_and_others_over_tcp() -> None:
    carriers = Carriers(NODES, TcpCarrier(), [Reader(True), Reader(False)])
    assert carriers.borrow(0, 1, b"n", b"k") == BorrowToRead(1, b"n", b"k", "UCX")
    assert carriers.borrow(1, 1, b"n", b"k") == Borrow(1, b"n", b"k")
    assert carriers.of(0, lease()) == "by nixl"
    assert carriers.nixl_state() == {"num_nixl_ready": 1, "num_by_nixl": 6, "num_nixl_started": 2}


def test_carriers_when_a_node_lends_over_tcp_then_one_line_says_so(caplog) -> None:
    tcp = TcpCarrier()
    carriers = Carriers(NODES, tcp, [Reader(True), Reader(True)])
    with caplog.at_level(logging.WARNING, logger="banyan"):
        for node in (0, 0, 1, 0, 0, 1, 1):
            assert carriers.of(node, RemoteLease(1, TOKEN, 1, b"")) is tcp
    assert [str(node) in line for node, line in zip(NODES, caplog.messages, strict=True)] == [True, True]


def test_carriers_when_a_node_is_read_again_then_what_was_before_does_not_count(caplog) -> None:
    carriers = Carriers(NODES, TcpCarrier(), [Reader(True), Reader(True)])
    for remote_lease in (RemoteLease(1, TOKEN, 1, b""),) * 2 + (lease(),) + (RemoteLease(1, TOKEN, 1, b""),) * 2:
        carriers.of(0, remote_lease)
    assert caplog.messages == []


def test_carriers_when_a_lease_can_be_read_and_nothing_reads_here_then_it_comes_over_tcp() -> None:
    tcp = TcpCarrier()
    assert Carriers(NODES, tcp).of(0, lease()) is tcp


def test_carriers_when_the_process_has_died_since_a_lease_could_be_read_then_it_comes_over_tcp() -> None:
    tcp = TcpCarrier()
    assert Carriers(NODES, tcp, [Reader(False), Reader(True)]).of(0, lease()) is tcp


def test_carriers_when_nixl_brings_nothing_from_a_node_then_its_pages_come_over_tcp_for_a_while(caplog) -> None:
    tcp, now_s = TcpCarrier(), 0.0
    carriers = Carriers(NODES, tcp, [Reader(True), Reader(True)], lambda: now_s)

    def pull(node: int, ended: Ended) -> Any:
        carrier = carriers.of(node, lease())
        carriers.ended(node, carrier, ended)
        return carrier

    for ended in (Ended.LOST, Ended.LOST, Ended.GIVEN_UP, Ended.WHOLE, Ended.LOST, Ended.DAMAGED, Ended.LOST):
        assert pull(0, ended) == "by nixl"
    carriers.ended(0, "by nixl", Ended.LOST)
    assert pull(0, Ended.WHOLE) is tcp and pull(1, Ended.WHOLE) == "by nixl"
    assert type(carriers.borrow(0, 1, b"n", b"k")) is Borrow
    assert carriers.nixl_state()["num_nixl_ready"] == 1
    now_s += PAUSE_S
    assert pull(0, Ended.LOST) == "by nixl"
    now_s += PAUSE_S
    assert pull(0, Ended.WHOLE) is tcp, "twice as long"
    now_s += PAUSE_S
    assert pull(0, Ended.WHOLE) == "by nixl" and pull(0, Ended.LOST) == "by nixl"
    assert [str(NODES[0]) in line and "--banyan-carrier tcp" in line for line in caplog.messages] == [True, True]


def test_carriers_when_tcp_does_not_bring_a_nodes_pages_either_then_it_rests_and_longer_each_time(caplog) -> None:
    tcp, now_s = TcpCarrier(), 0.0
    carriers = Carriers(NODES, tcp, clock=lambda: now_s)
    for ended in (Ended.LOST, Ended.LOST, Ended.GIVEN_UP, Ended.WHOLE, Ended.LOST, Ended.DAMAGED):
        carriers.ended(0, tcp, ended)
        assert not carriers.rests(0)
    for _ in range(2):
        carriers.ended(0, tcp, Ended.LOST)
        assert carriers.rests(0) and not carriers.rests(1)
    now_s += PAUSE_S
    assert not carriers.rests(0), "what was under way does not count"
    for doublings in (*range(1, MOST_DOUBLINGS + 1), MOST_DOUBLINGS):
        carriers.ended(0, tcp, Ended.LOST)
        now_s += (PAUSE_S << doublings) - 1
        assert carriers.rests(0)
        now_s += 1
        assert not carriers.rests(0)
    carriers.ended(0, tcp, Ended.WHOLE)
    carriers.ended(0, tcp, Ended.LOST)
    assert not carriers.rests(0)
    assert all(str(NODES[0]) in line and "port" in line for line in caplog.messages)


def test_carriers_when_nixl_brings_nothing_from_a_node_then_it_does_not_rest_before_tcp_was_tried() -> None:
    tcp = TcpCarrier()
    carriers = Carriers(NODES, tcp, [Reader(True), Reader(True)])
    for num_failed in range(2 * NUM_FAILED):
        assert not carriers.rests(0)
        carrier = carriers.of(0, lease())
        assert (carrier is tcp) == (num_failed >= NUM_FAILED)
        carriers.ended(0, carrier, Ended.LOST)
    assert carriers.rests(0)


class Kept:
    def __init__(self, process: Any) -> None:
        self.process = process
        self.num_renewed = 0

    def get(self) -> Any:
        return self.process

    def renew(self) -> None:
        self.num_renewed += 1


def lending(process: Any) -> LentByNixl:
    lent = LentByNixl("UCX")
    lent._kept = Kept(process)
    return lent


def leased(*parts: tuple[int, list[int]]) -> Any:
    return SimpleNamespace(
        parts=[
            SimpleNamespace(memory=SimpleNamespace(identity=(1, number)), offsets=offsets) for number, offsets in parts
        ]
    )


def test_frames_when_all_parts_are_known_to_nixl_then_their_places_there_are_told() -> None:
    lent = lending(SimpleNamespace(addresses={(1, 1): 1000, (1, 2): 9000}, metadata=b"about it"))
    readable = lent.readable(leased((1, [0, 50]), (2, [7])))
    assert readable is not None
    agent, places = readable
    assert agent == b"about it" and list(array("Q", places)) == [1000, 1050, 9007] and lent.num_lent == 1


def test_frames_when_a_part_came_later_then_they_go_over_tcp_and_the_next_process_knows_it() -> None:
    lent = lending(SimpleNamespace(addresses={(1, 1): 1000}, metadata=b"about it"))
    assert lent.readable(leased((1, [0]), (2, [7]))) is None
    assert lent._kept.num_renewed == 1 and lent.num_lent == 0


class FakeProcess:
    """Does not take memory that may only be read."""

    made: ClassVar[list[FakeProcess]] = []

    def __init__(self, backend: str, role: str) -> None:
        self.mapped: list[tuple[Any, ...]] = []
        self.is_dead = False
        self.made.append(self)

    @contextmanager
    def killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.is_dead = True
            raise

    def map(self, *memory: Any, is_writable: bool) -> None:
        if not is_writable:
            raise Declined("NIXL_ERR_BACKEND")
        self.mapped.append(memory)


def test_arena_when_a_card_takes_none_for_reading_alone_then_it_may_be_written_and_a_line_says_so(
    monkeypatch, caplog
) -> None:
    monkeypatch.setattr(nixl_pulls, "NixlProcess", FakeProcess)
    memory = SimpleNamespace(path="/proc/1/fd/2", identity=(1, 2), num_bytes=4096)
    with caplog.at_level(logging.WARNING, logger="banyan"):
        process = LentByNixl("UCX")._start(lambda: [memory])
    first, second = FakeProcess.made
    assert first.is_dead and process is second and second.mapped == [("/proc/1/fd/2", (1, 2), 4096)]
    assert "NIXL_ERR_BACKEND" in caplog.text and "can write" in caplog.text


def test_frames_when_no_process_is_up_then_they_go_over_tcp() -> None:
    assert lending(None).readable(leased((1, [0]))) is None
    assert LentByNixl("UCX").readable(leased((1, [0]))) is None
