# SPDX-License-Identifier: Apache-2.0
"""Pages between two nodes over a loopback that fails in every way: no wrong byte lands, no lease or frame is left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from typing import Any

import pytest
from test.unit.cache_rig import request
from test.unit.directory.rig import NAMESPACE, frames, ids, keys
from test.unit.features.nodes.rig import BLOCK, NUM_LAYERS, Node, whole

from banyan import _native
from banyan.arena.page_source import Wanted
from banyan.core import Address
from banyan.features.nodes.exported_arena import PartFrames
from banyan.features.nodes.lending import Lending
from banyan.features.nodes.pull import NodeFound, Pull
from banyan.features.nodes.remote_leases import TERM_S
from banyan.features.nodes.tcp import Layers
from banyan.features.nodes.wire import (
    Ask,
    Borrow,
    Foreign,
    RemoteLease,
    Return,
    encode,
    pack_keys,
    read_by_borrower,
    read_by_page_server,
)

NUM_FAULTS = 10_000
NUM_PAGES = 6
TARGETS = (9, 1, 7, 2, 12, 14)


class Fault(Enum):
    """What goes wrong, once in each pull."""

    NONE = auto()
    CUT = auto()
    TRUNCATED = auto()
    CORRUPT = auto()
    PAGES_SWAPPED = auto()
    LAYERS_SWAPPED = auto()
    OLD_BYTES = auto()
    LATE = auto()
    RESTARTED = auto()
    REUSED = auto()
    MESSAGE_LOST = auto()
    MESSAGE_DAMAGED = auto()
    GIVEN_UP = auto()


class Loopback:
    """A source and its wire, in one process, with a seeded fault. In place of ``nodes.tcp.TcpCarrier``."""

    def __init__(self, lender: Lender, rng: random.Random, fault: Fault) -> None:
        self._lender = lender
        self._rng = rng
        self._fault = fault

    def pull(
        self,
        source: Address,
        token: bytes,
        target: Layers,
        num_layers: int,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Generator[int, None, None]:
        at = self._rng.randrange(num_layers)
        for layer in range(num_layers):
            if layer == at:
                self._lender.suffer(self._fault)
            lent = self._lender.lending.remote_leases.find(token)
            if lent is None:
                raise ConnectionError("the source has closed the connection")
            shown = (layer + 1) % num_layers if self._fault is Fault.LAYERS_SWAPPED else layer
            pieces = [bytes(view) for view in lent.leased_frames.layer(shown)]
            views = target.layer(layer)
            if layer == at:
                pieces = self._spoil(pieces)
            for view, piece in zip(views, pieces, strict=False):
                view[: len(piece)] = piece
            if layer == at and self._fault in (Fault.CUT, Fault.TRUNCATED):
                raise ConnectionError("cut")
            yield layer

    def _spoil(self, pieces: list[bytes]) -> list[bytes]:
        page = self._rng.randrange(len(pieces))
        match self._fault:
            case Fault.CORRUPT:
                damaged = bytearray(pieces[page])
                damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
                pieces[page] = bytes(damaged)
            case Fault.PAGES_SWAPPED:
                pieces[page], pieces[0] = pieces[0], pieces[page]
            case Fault.TRUNCATED:
                pieces = [*pieces[:page], pieces[page][: self._rng.randrange(len(pieces[page]))]]
            case Fault.OLD_BYTES:
                pieces[page] = b"\0" * len(pieces[page])
        return pieces


class Lender:
    """A node that lends, under a clock of the test's."""

    def __init__(self) -> None:
        self.node = Node()
        self.now_s = 0.0
        self.pages = self.node.keep(range(1, NUM_PAGES + 1), range(NUM_PAGES))
        self.lending = Lending(max_pages=100, clock=lambda: self.now_s)
        self.exported = self.node.exported()
        self.lending.lend(self.exported)

    def suffer(self, fault: Fault) -> None:
        if fault is Fault.LATE:
            self.now_s += TERM_S + 1
            self.lending.remote_leases.expire()
        elif fault is Fault.RESTARTED:
            self.lending.withdraw()
            self.lending.lend(self.exported)
        elif fault is Fault.REUSED:
            # What the lease forbids, as a source without one would do: other bytes in the middle of the pull.
            memoryview(self.node.memory)[:] = bytes(len(memoryview(self.node.memory)))

    def recover(self, fault: Fault, content: bytes) -> None:
        if fault is Fault.REUSED:
            memoryview(self.node.memory)[:] = content


class Wire:
    """The other nodes as the borrower sees them: messages go through their real form. In place of a ``Borrower``."""

    def __init__(self, lender: Lender, memory: _native.SharedBytes) -> None:
        self._lender = lender
        self._memory = memory
        self._answers: list[tuple[int, NodeFound | None]] = []

    def set_fault(self, rng: random.Random, fault: Fault) -> None:
        self._rng, self._fault = rng, fault

    def _said(self, message: Any) -> Any:
        heard, lending = read_by_page_server(encode(message)), self._lender.lending
        return (lending.borrow if isinstance(heard, Borrow) else lending.answer)(heard, port=1)

    def ask(self, asked: Sequence[str]) -> int:
        answer = read_by_borrower(encode(self._said(Ask(1, NAMESPACE, pack_keys(asked)))))
        self._answers.append((1, NodeFound("there:1", 0, asked[: answer.num_pages]) if answer.num_pages else None))
        return 1

    def answers(self) -> list[tuple[int, NodeFound | None]]:
        answers, self._answers = self._answers, []
        return answers

    def read(self, found: NodeFound, num_pages: int, memory: _native.SharedBytes, offsets: Any) -> _native.Read:
        feed = _native.Feed(memory, offsets, BLOCK.block_bytes, NUM_LAYERS)
        read = feed.read()
        pull = Pull(NAMESPACE, found.keys[:num_pages], PartFrames(memory, offsets, BLOCK.layer_bytes), feed)
        remote_lease = self._said(Borrow(2, NAMESPACE, pack_keys(pull.keys)))
        payload = bytearray(encode(remote_lease))
        if self._fault is Fault.MESSAGE_LOST:
            feed.end()
            return read
        if self._fault is Fault.MESSAGE_DAMAGED:
            payload[self._rng.randrange(len(payload))] ^= 1 << self._rng.randrange(8)
        try:
            heard = read_by_borrower(bytes(payload))
        except Foreign:
            heard = None
        if isinstance(heard, RemoteLease):
            pull.carry(heard, "there", Loopback(self._lender, self._rng, self._fault))
            self._said(Return(remote_lease.token))
        feed.end()
        return read


def test_pull_when_anything_fails_on_the_way_then_no_wrong_byte_lands_and_nothing_is_left() -> None:
    lender, borrower = Lender(), Node()
    wire = Wire(lender, borrower.memory)
    borrower.borrow_through(wire)
    content = bytes(memoryview(lender.node.memory))
    outcomes: Counter[tuple[Fault, bool]] = Counter()
    for seed in range(NUM_FAULTS):
        rng = random.Random(seed)
        fault = rng.choice(list(Fault))
        num_pages = rng.randint(1, NUM_PAGES)
        wire.set_fault(rng, fault)
        outcomes[fault, fetch(borrower, lender, num_pages, rng, gives_up=fault is Fault.GIVEN_UP)] += 1
        lender.recover(fault, content)
        nothing_is_left(borrower, lender)
    assert all(not outcomes[fault, True] for fault in (Fault.CUT, Fault.TRUNCATED, Fault.CORRUPT, Fault.MESSAGE_LOST))
    assert not outcomes[Fault.NONE, False] and outcomes[Fault.NONE, True] > NUM_FAULTS / 50
    assert {fault for fault, _ in outcomes} == set(Fault)


def fetch(borrower: Node, lender: Lender, num_pages: int, rng: random.Random, *, gives_up: bool) -> bool:
    """Fetch pages into the pool; whether they landed. If so, or where they are resident, they are the right ones."""
    wanted = keys(*range(1, num_pages + 1))
    targets = frames(*TARGETS[:num_pages])
    borrower.remote.ask(Wanted("r", wanted, 0, whole))
    borrower.remote.poll()
    offer = borrower.cache.prepare(request("r"), wanted)
    landed = False
    if offer.num_pages:
        fetch = borrower.cache.admit("r", wanted[: offer.num_pages], targets[: offer.num_pages])
        if gives_up or fetch is None:
            borrower.cache.cancel("r")
        else:
            landed = borrower.cache.finish(borrower.cache.start())
            if landed:
                got = [borrower.rank.pages(frame) for frame in TARGETS[: offer.num_pages]]
                assert got == lender.pages[: offer.num_pages]
    borrower.prefetch.poll()
    for page, key in enumerate(wanted):
        frame = borrower.residency.frame(key)
        if frame is not None:
            start = frame * BLOCK.frame_bytes
            assert bytes(memoryview(borrower.memory)[start : start + BLOCK.block_bytes]) == b"".join(lender.pages[page])
    return landed and offer.num_pages == num_pages


def nothing_is_left(borrower: Node, lender: Lender) -> None:
    assert borrower.residency.num_filling == 0
    borrower.residency.reset()
    assert borrower.frame_table.num_quarantined == 0
    if lender.lending.remote_leases.num_remote_leases:
        # What nobody gives back runs out.
        lender.now_s += TERM_S
        lender.lending.remote_leases.expire()
    assert (lender.lending.remote_leases.num_remote_leases, lender.lending.remote_leases.num_pages) == (0, 0)


def test_frames_when_all_remote_leases_have_ended_then_their_owner_has_them_back() -> None:
    lender = Lender()
    lent = lender.lending.borrow(Borrow(1, NAMESPACE, pack_keys(keys(1, 2))), port=1)
    assert isinstance(lent, RemoteLease)
    lender.node.residency.reset()
    assert lender.node.frame_table.num_quarantined == 2
    lender.now_s += TERM_S
    lender.lending.remote_leases.expire()
    assert lender.lending.remote_leases.num_remote_leases == 0
    assert len(ids(lender.node.frame_table.drain())) == 2 and lender.node.frame_table.num_quarantined == 0


@pytest.mark.parametrize("reader", [read_by_page_server, read_by_borrower])
def test_message_when_it_is_random_then_it_is_read_or_refused(reader: Any) -> None:
    rng = random.Random(0)
    samples = [encode(Ask(1, NAMESPACE, pack_keys(keys(1)))), encode(RemoteLease(1, b"t" * 16, 1, b"s" * 8))]
    for _ in range(20_000):
        payload = bytearray(rng.choice(samples))
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            reader(bytes(payload[: rng.randrange(len(payload) + 1)]))
        except Foreign:
            continue
