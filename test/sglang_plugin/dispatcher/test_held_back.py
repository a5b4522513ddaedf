# SPDX-License-Identifier: Apache-2.0
"""Requests held back until a rank has computed what they begin with: each way in which the wait can end."""

import dataclasses
import time

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.load_snapshot import LoadSnapshot
from test.sglang_plugin.dispatcher.dispatch_rig import page_keys, placer_of, request
from test.unit.directory.rig import Rank, frames

from banyan._native import RankTable
from banyan.routing import Dispatcher, Wait
from banyan.routing.policies import LMetric
from banyan.sglang_plugin.dispatcher.held_back import IDLE_S, MAX_HELD, MAX_LOOKS, MOST_WAIT_S, PATIENCE, HeldBack

FIRST = list(range(640))
SECOND = [*FIRST[:480], *range(10_000, 10_160)]
BOTH = (0, 1)


def snapshot(rank, *, num_prefilled=1_000):
    return LoadSnapshot(
        timestamp=time.time(),
        dp_rank=rank,
        total_prefill_uncached_tokens=num_prefilled,
        total_prefill_busy_us=1_000_000,
    )


class Rig:
    """Two ranks whose pools are full. Rank 0 computes FIRST. What is sent is in ``sent``."""

    def __init__(self):
        self.rank_table = RankTable.create(2)
        self.ranks = [Rank(self.rank_table, slot, num_frames=64) for slot in range(2)]
        self.snapshots = [snapshot(0), snapshot(1)]
        self.placer = placer_of(self.rank_table, dispatcher=Dispatcher(2, LMetric()))
        self.placer._read_snapshots = lambda: self.snapshots
        self.placer._probe.unused_tokens = lambda now_s: {0: 0, 1: 0}
        self.sent, self.now_s = [], 50.0
        self.held_back = HeldBack(self.placer, self.sent.append, clock=lambda: self.now_s)
        assert self.placer.place(request(FIRST, rid="first", routed_dp_rank=0), BOTH) is None

    def begin(self, rid="r"):
        req = request(SECOND, rid=rid)
        wait = self.placer.place(req, BOTH)
        assert isinstance(wait, Wait) and (wait.rank, wait.num_tokens) == (0, 480) and req.routed_dp_rank is None
        # 640 tokens, 1,000 a second, less what has been computed since they were sent.
        assert 0 <= wait.expected_s <= 0.64
        self.expected_s = wait.expected_s
        self.held_back.begin(req, wait)
        self.held_back.send_on(BOTH)
        assert self.held_back.num_held == 1 and self.sent == []
        return req

    def ended(self, req, until):
        (sent,) = self.sent
        told = sent.kv_hints.actions[0].payload
        assert sent is req and self.held_back.num_held == 0
        assert told["held_until"] == until
        self.held_back.send_on(BOTH)
        assert len(self.sent) == 1, "sent on exactly once"
        return told


def test_held_when_the_pages_are_published_then_it_is_placed_and_told_of_them():
    rig = Rig()
    req = rig.begin()
    rig.ranks[0].frame_table.publish(frames(*range(29)), page_keys(FIRST[:464]))
    rig.held_back.send_on(BOTH)
    assert rig.held_back.num_held == 1, "one page is missing"
    rig.ranks[0].frame_table.publish(frames(29), page_keys(FIRST[:480])[29:])
    rig.now_s += 0.25
    rig.held_back.send_on(BOTH)
    told = rig.ended(req, "landed")
    assert (told["dp_max_kv_len"], told["dp_max_kv_rank"], told["held_us"]) == (480, 0, 250_000)
    assert req.routed_dp_rank in BOTH


def test_held_when_the_rank_has_computed_more_and_the_pages_are_not_there_then_it_is_not_waited_for():
    rig = Rig()
    req = rig.begin()
    rig.snapshots = [snapshot(0, num_prefilled=1_700), snapshot(1)]
    rig.held_back.send_on(BOTH)
    assert rig.held_back.num_held == 1, "its pages may be about to be published"
    rig.now_s += IDLE_S
    rig.held_back.send_on(BOTH)
    rig.ended(req, "given_up")


def test_held_when_nobody_will_look_again_then_all_are_sent_on_and_nobody_waits_from_then_on():
    rig = Rig()
    first, second = rig.begin("one"), request(SECOND, rid="two")
    rig.held_back.begin(second, rig.held_back._held[0].wait)
    sending = rig.held_back._send

    def send(req):
        sending(req)
        if req is first:
            raise OSError("no active worker")

    rig.held_back._send = send
    rig.held_back.hold_no_more(BOTH)
    assert rig.sent == [first, second] and rig.held_back.num_held == 0 and not rig.held_back.has_room


def test_held_when_it_takes_too_long_then_it_goes_without():
    rig = Rig()
    req = rig.begin()
    rig.now_s += PATIENCE * rig.expected_s + IDLE_S - 0.01
    rig.held_back.send_on(BOTH)
    assert rig.held_back.num_held == 1
    rig.now_s += 0.02
    rig.held_back.send_on(BOTH)
    rig.ended(req, "late")


def test_held_when_the_rank_has_become_slow_then_the_wait_ends_all_the_same():
    rig = Rig()
    req = rig.begin()
    held = rig.held_back._held[0]
    held.wait = dataclasses.replace(held.wait, expected_s=1e6)
    for waited_s in (MOST_WAIT_S, IDLE_S):
        assert rig.held_back.num_held == 1
        rig.now_s += waited_s
        rig.held_back.send_on(BOTH)
    rig.ended(req, "late")


@pytest.mark.parametrize(("active", "silent"), [((1,), set()), (BOTH, {0})], ids=["taken out", "silent"])
def test_held_when_the_rank_is_no_longer_active_then_another_one_has_it(active, silent):
    rig = Rig()
    req = rig.begin()
    rig.placer.silent = silent
    rig.held_back.send_on(active)
    rig.ended(req, "inactive")
    assert req.routed_dp_rank == 1


@pytest.mark.parametrize(
    "abort",
    [AbortReq(rid="r1_2"), AbortReq(rid="r1"), AbortReq(abort_all=True)],
    ids=["id", "of several", "all"],
)
def test_held_when_it_is_aborted_then_its_rank_hears_of_it_first(abort):
    rig = Rig()
    req = rig.begin("r1_2")
    for other in ("another", "r1_23", "r"):
        rig.held_back.abort(AbortReq(rid=other), BOTH)
    assert rig.held_back.num_held == 1 and rig.sent == []
    rig.held_back.abort(abort, BOTH)
    rig.ended(req, "aborted")


def test_held_when_placing_fails_then_sglangs_own_method_has_it(monkeypatch):
    rig = Rig()
    req = rig.begin()
    monkeypatch.setattr(rig.placer, "place_anew", lambda *args, **told: 1 / 0)
    rig.held_back.abort(AbortReq(rid="r"), BOTH)
    assert rig.sent == [req] and req.routed_dp_rank is None


def test_place_when_a_client_has_named_the_rank_then_it_does_not_wait():
    rig = Rig()
    assert rig.placer.place(request(SECOND, routed_dp_rank=1), BOTH) is None


def crowd(rig, number):
    """So many requests that wait for the same prompt."""
    reqs = [request(SECOND, rid=f"r{place}") for place in range(number)]
    for req in reqs:
        rig.held_back.begin(req, Wait(0, 480, 0.5))
    return reqs


def test_held_when_there_are_many_then_a_round_looks_at_a_few_in_turn_and_reads_the_loads_once(monkeypatch):
    rig, rounds = Rig(), 2
    reqs = crowd(rig, rounds * MAX_LOOKS)
    looked, reads = [], []
    look_up, read = rig.placer._probe.look_up, rig.placer._read_snapshots
    monkeypatch.setattr(rig.placer._probe, "look_up", lambda req: (looked.append(req), look_up(req))[1])
    rig.placer._read_snapshots = lambda: (reads.append(1), read())[1]
    for _ in range(rounds):
        rig.held_back.send_on(BOTH)
    assert looked == reqs and len(reads) == rounds
    rig.ranks[0].frame_table.publish(frames(*range(30)), page_keys(FIRST[:480]))
    for _ in range(rounds):
        rig.held_back.send_on(BOTH)
    assert rig.sent == reqs, "in the order in which they came"


def test_held_when_there_are_too_many_then_there_is_no_room():
    rig = Rig()
    crowd(rig, MAX_HELD - 1)
    assert rig.held_back.has_room
    crowd(rig, 1)
    assert not rig.held_back.has_room and rig.held_back.num_held == MAX_HELD


def test_held_when_it_cannot_be_looked_after_then_it_is_sent_on_and_that_is_said(monkeypatch, caplog):
    rig = Rig()
    req = rig.begin()
    monkeypatch.setattr(rig.placer, "is_coming", lambda *args: 1 / 0)
    rig.held_back.send_on(BOTH)
    rig.ended(req, "failed")
    assert "ZeroDivisionError" in caplog.text


def test_held_when_the_loads_cannot_be_read_then_the_last_ones_count_and_the_wait_ends(monkeypatch, caplog):
    rig = Rig()
    req = rig.begin()

    def broken():
        raise ValueError("half a snapshot")

    rig.placer._read_snapshots = broken
    rig.held_back.send_on(BOTH)
    assert rig.held_back.num_held == 1 and "half a snapshot" in caplog.text
    rig.now_s += PATIENCE * rig.expected_s + IDLE_S
    rig.held_back.send_on(BOTH)
    assert rig.sent == [req] and rig.held_back.num_held == 0
