# SPDX-License-Identifier: Apache-2.0
"""Requests of a decode server that are let in, held back, aborted and failed in any order, as its scheduler does it:
every lease ends, no page of the pool is given up while it is written, and none goes on before all is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from test.conftest import examples

from banyan.features.pairs.take_back import State, TakeBacks
from banyan.telemetry import Counters

NUM_ARENA_PAGES = 6
NUM_POOL_PAGES = 8
PROMPT = [str(page) for page in range(8)]


class Lease:
    def __init__(self, arena: Arena, num_pages: int) -> None:
        self.num_pages = num_pages
        self.runs = [(0, num_pages)]
        self._arena = arena
        arena.leases.add(self)

    def release(self) -> None:
        self._arena.leases.discard(self)


class Copy:
    """Ends when the test says so, or when it is waited for."""

    def __init__(self, lease: Lease, frames: list[int], lands: bool) -> None:
        self.frames, self.has_ended = frames, False
        self._lease, self._lands = lease, lands

    def finish(self) -> bool:
        self.has_ended = True
        self._lease.release()
        return self._lands


class Arena:
    """The copies and leases of it that there are; and whether a lease is granted and a copy lands."""

    def __init__(self) -> None:
        self.leases: set[Lease] = set()
        self.copies: list[Copy] = []
        self.grants = self.lands = True

    def lookup(self, keys, slots):
        held = [key for key in keys if int(key) < NUM_ARENA_PAGES]
        return SimpleNamespace(num_pages=len(held))

    def lease(self, match, keys):
        return Lease(self, len(keys)) if self.grants else None

    def start_copy(self, loads):
        ((lease, frames),) = loads
        self.copies.append(Copy(lease, frames, self.lands))
        return self.copies[-1]

    def writes(self, frame: int) -> bool:
        return any(frame in copy.frames and not copy.has_ended for copy in self.copies)


@dataclass
class Request:
    take_back: object
    slots: list[int] = field(default_factory=list)


class Scheduler:
    """The steps of a decode server, in SGLang's order: let in, look at transfers, collect."""

    def __init__(self) -> None:
        self.arena, self.counters = Arena(), Counters()
        self.take_backs = TakeBacks(lambda: self.arena, [0], self.counters)
        self.free = list(range(NUM_POOL_PAGES))
        self.transfers: list[Request] = []

    def match(self, prompt_pages: int, num_held: int):
        return self.take_backs.promise(PROMPT[:prompt_pages], num_held)

    def let_in(self, promised) -> None:
        if promised is None:
            return
        if len(self.free) < promised.num_pages:
            promised.has_no_place()
            self.transfers.append(Request(promised))
            return
        slots = [self.free.pop() for _ in range(promised.num_pages)]
        self.take_backs.begin(promised, slots)
        self.transfers.append(Request(promised, slots))

    def transfer(self, number: int, *, has_failed: bool) -> None:
        """What ``poll`` of a receiver does, and what SGLang does with the answer."""
        if not self.transfers:
            return
        request = self.transfers[number % len(self.transfers)]
        if has_failed:
            request.take_back.settle()
        elif request.take_back.state is State.COPYING:
            return
        else:
            assert request.take_back.state in (State.IN, State.FAILED)
        assert not any(self.arena.writes(frame) for frame in request.slots)
        self.transfers.remove(request)
        self.free += request.slots


steps = st.lists(
    st.one_of(
        st.tuples(st.just("let in"), st.integers(1, 8), st.integers(0, 7)),
        st.tuples(st.just("match only"), st.integers(1, 8), st.integers(0, 7)),
        st.tuples(st.just("handed over"), st.integers(0, 9)),
        st.tuples(st.just("failed"), st.integers(0, 9)),
        st.tuples(st.just("copied"), st.integers(0, 9)),
        st.tuples(st.just("grants"), st.booleans()),
        st.tuples(st.just("lands"), st.booleans()),
        st.tuples(st.just("collect")),
        st.tuples(st.just("other weights")),
    ),
    max_size=40,
)


def play(scheduler: Scheduler, step: tuple) -> None:
    what, *values = step
    if what in ("let in", "match only"):
        promised = scheduler.match(*values)
        if what == "let in":
            scheduler.let_in(promised)
    elif what in ("handed over", "failed"):
        scheduler.transfer(values[0], has_failed=what == "failed")
    elif what == "copied" and scheduler.arena.copies:
        scheduler.arena.copies[values[0] % len(scheduler.arena.copies)].has_ended = True
    elif what in ("grants", "lands"):
        setattr(scheduler.arena, what, values[0])
    elif what == "collect":
        scheduler.take_backs.poll()
    elif what == "other weights":
        scheduler.take_backs.quiesce()


@settings(max_examples=examples(500), deadline=None)
@given(steps)
def test_requests_when_they_end_in_any_way_then_no_lease_page_or_promise_is_left(played):
    scheduler = Scheduler()
    for step in played:
        play(scheduler, step)
        # No promise outlives its step.
        if step[0] in ("match only",):
            scheduler.take_backs.poll()
        open_leases = {copy for copy in scheduler.arena.copies if not copy.has_ended}
        assert len(scheduler.arena.leases) <= scheduler.take_backs.num_open + len(open_leases)
    while scheduler.transfers:
        scheduler.transfer(0, has_failed=True)
    scheduler.take_backs.poll()
    assert not scheduler.arena.leases and scheduler.take_backs.num_open == 0
    assert sorted(scheduler.free) == list(range(NUM_POOL_PAGES))
