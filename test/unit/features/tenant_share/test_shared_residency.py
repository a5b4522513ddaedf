# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test.unit.arena.test_residency import FakeFrameTable, LargeFrameTable

from banyan.arena import residency as residency_module
from banyan.arena.owners import Owners
from banyan.arena.residency import Residency
from banyan.features.tenant_share.shared_residency import SharedResidency

NUM_FRAMES = 12
OWNERS = ("", "a", "b", "c")


def owner_of(keys):
    """Keys here are an owner and a number."""
    return keys[0].partition(":")[0] if keys else ""


def shared(frame_table, num_frames=NUM_FRAMES, kept=(), share=0.5):
    return SharedResidency(frame_table, num_frames, kept, share=share, owner_of=owner_of)


def named(owner, first, num_pages):
    return [f"{owner}:{first + number}" for number in range(num_pages)]


def fill(residency, keys):
    frames = residency.claim(len(keys), (), keys)
    residency.publish(frames, keys[: len(frames)])
    return frames


def held_by(residency):
    return Counter(owner_of([key]) for key in residency.keys)


@pytest.fixture
def frame_table():
    return FakeFrameTable()


def test_scan_when_it_is_larger_than_the_arena_then_a_tenant_below_its_share_loses_nothing(frame_table):
    residency = shared(frame_table)
    fill(residency, named("a", 0, 5))
    for first in range(0, 40, 2):
        fill(residency, named("b", first, 2))
    assert held_by(residency) == {"a": 5, "b": 7}, "room that nobody else wants is anybody's"
    assert set(named("a", 0, 5)) < set(residency.keys) and set(named("b", 38, 2)) < set(residency.keys)


def test_room_when_a_tenant_below_its_share_wants_it_then_those_above_theirs_make_it(frame_table):
    residency = shared(frame_table)
    fill(residency, named("a", 0, 2))
    fill(residency, named("b", 0, 10))
    frame_table.touched |= {residency.frame(key) for key in named("b", 0, 10)}
    fill(residency, named("c", 0, 4))
    assert held_by(residency) == {"a": 2, "b": 6, "c": 4}
    fill(residency, named("c", 4, 2))
    assert held_by(residency)["c"] == 6, "below its share a tenant takes what the clock gives"
    before = set(residency.keys)
    fill(residency, named("c", 6, 2))
    assert before - set(residency.keys) == set(named("c", 2, 2)), "at its share it takes its own, a chain from its end"


def test_claim_when_its_owner_is_at_its_share_and_its_own_pages_are_held_then_fewer_frames(frame_table):
    residency = shared(frame_table)
    fill(residency, named("a", 0, 6))
    frames = fill(residency, named("b", 0, 6))
    residency.hold(frames[:5])
    assert len(residency.claim(3, (), ["b:9"])) == 1
    assert held_by(residency)["a"] == 6


def test_claim_when_free_frames_make_it_more_than_its_share_then_the_rest_is_its_own(frame_table):
    residency = shared(frame_table)
    fill(residency, named("a", 0, 5))
    fill(residency, named("b", 0, 5))
    fill(residency, named("b", 5, 4))
    assert held_by(residency) == {"a": 5, "b": 7}


def test_claim_when_others_make_room_up_to_its_share_then_the_rest_is_its_own(frame_table):
    residency = shared(frame_table, share=0.25)
    for owner, num_pages in (("a", 3), ("d", 3), ("b", 2), ("c", 4)):
        fill(residency, named(owner, 0, num_pages))
    fill(residency, named("b", 2, 2))
    assert held_by(residency) == {"a": 3, "d": 3, "b": 3, "c": 3}


def test_pages_of_nobody_when_room_is_wanted_then_they_go_first_and_push_out_nobodys(frame_table):
    residency = shared(frame_table)
    residency.adopt([0, 1, 2], ["x", "y", "z"])
    fill(residency, named("a", 0, 5))
    fill(residency, named("b", 0, 4))
    fill(residency, named("", 0, 2))
    assert held_by(residency) == {"a": 5, "b": 4, "": 2, "z": 1}
    fill(residency, named("b", 4, 1))
    assert "z" not in residency.keys


def test_what_is_kept_when_its_tenant_is_above_its_share_then_others_go_before_it(frame_table):
    kept = set(named("b", 0, 2))
    residency = shared(frame_table, kept=kept)
    fill(residency, named("b", 0, 12))
    fill(residency, named("a", 0, 6))
    assert held_by(residency) == {"a": 6, "b": 6} and kept < set(residency.keys)


def test_what_is_kept_when_it_is_all_of_a_tenant_above_its_share_then_it_is_walked_past_once(frame_table):
    """Each walk is the scheduler thread's, and a pin may last a day."""
    kept = set(named("b", 0, 8))
    residency = shared(frame_table, kept=kept, share=0.25)
    fill(residency, named("b", 0, 8))
    fill(residency, named("a", 0, 4))
    frame_table.num_examined = 0
    for number in range(4, 24):
        fill(residency, named("a", number, 1))
    assert frame_table.num_examined <= 8 + 2 * 20
    kept.clear()
    residency.kept_no_more(named("b", 0, 8))
    for number in range(30, 35):
        fill(residency, named("a", number, 1))
    assert held_by(residency) == {"a": 5, "b": 7}, "what queues again is the youngest"


def test_claim_when_more_pages_of_all_were_asked_for_than_it_passes_then_one_of_who_has_most_leaves_marked():
    frame_table = LargeFrameTable()
    residency = shared(frame_table, 100_000)
    fill(residency, named("a", 0, 20_000))
    fill(residency, named("b", 0, 80_000))
    frame_table.touched = set(range(100_000))
    assert len(residency.claim(1, (), ["a:20000"])) == 1
    assert frame_table.num_examined < 25_000
    assert held_by(residency) == {"a": 20_000, "b": 79_999}


def test_part_when_it_grows_then_shares_do_too(frame_table):
    residency = shared(frame_table, 4)
    fill(residency, named("b", 0, 4))
    residency.grow(4)
    fill(residency, named("a", 0, 4))
    fill(residency, named("a", 4, 1))
    assert held_by(residency) == {"a": 4, "b": 4}, "both have their share"


def test_reset_when_frames_are_being_filled_then_these_alone_are_their_owners(frame_table):
    residency = shared(frame_table)
    fill(residency, named("b", 0, 8))
    filling = residency.claim(4, (), ["b:20"])
    residency.reset()
    fill(residency, named("a", 0, 8))
    residency.publish(filling, named("b", 20, 4))
    fill(residency, named("b", 24, 2))
    assert held_by(residency) == {"a": 6, "b": 6}


def test_demoted_pages_when_their_tenant_makes_room_then_they_are_the_first(frame_table):
    residency = shared(frame_table)
    fill(residency, named("b", 0, 12))
    assert residency.demote(named("b", 3, 2)) == 2
    fill(residency, named("a", 0, 2))
    assert not set(named("b", 3, 2)) & set(residency.keys)


def test_shares_when_nobody_asks_for_them_then_the_residency_is_the_plain_one(frame_table):
    assert type(Owners().residency(frame_table, 4, ())) is Residency


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["fill", "abandon", "touch", "hold", "unhold", "pin", "demote", "reset", "keep"] + ["fill"] * 8
        ),
        st.sampled_from(OWNERS),
        st.integers(0, 9),
        st.integers(1, 6),
        st.sets(st.integers(0, NUM_FRAMES - 1), max_size=6),
    ),
    max_size=60,
)


class Run:
    """Steps, and what must hold after each."""

    def __init__(self, share):
        self.frame_table = FakeFrameTable()
        self.kept = set()
        self.residency = shared(self.frame_table, share=share, kept=self.kept)
        self.most = int(share * NUM_FRAMES)
        self.held = []

    def step(self, what, owner, first, num_pages, frames):
        residency, frame_table = self.residency, self.frame_table
        match what:
            case "fill" | "abandon":
                self.claim(owner, named(owner, first, num_pages), what)
            case "touch":
                frame_table.touched |= frames & set(frame_table.key_of)
            case "hold":
                chosen = sorted(frames & set(frame_table.key_of))
                residency.hold(chosen)
                self.held += chosen
            case "unhold" if self.held:
                residency.unhold([self.held.pop()])
            case "pin":
                frame_table.pinned = frames
            case "demote":
                residency.demote(named(owner, first, num_pages))
            case "reset" if not first:
                residency.reset()
            case "keep" if self.kept:
                gone = sorted(self.kept)
                self.kept.clear()
                residency.kept_no_more(gone)
            case "keep":
                self.kept |= set(named(owner, first, num_pages))
        self.check_accounts()

    def claim(self, owner, keys, what):
        residency = self.residency
        before, pages = held_by(residency), set(residency.keys)
        above = [one for one in before if not one or before[one] > self.most]
        stuck = self.kept | {residency._key_of[frame] for frame in self.held if frame in residency._key_of}
        frames = residency.claim(len(keys), (), keys)
        after, gone = held_by(residency), pages - set(residency.keys)
        num_claimant = after[owner] + len(frames)
        for other in filter(None, before.keys() - {owner}):
            lost = before[other] - after[other]
            if lost and after[other] < self.most:
                assert num_claimant <= self.most and owner, "a tenant loses below its share to one above its own"
                spare = set(residency.keys) - stuck
                left = [one for one in above if not one or after[one] > self.most]
                assert not any(owner_of([key]) in left for key in spare), "somebody above its share has not made room"
        assert len(gone) <= len(keys)
        if what == "abandon":
            residency.abandon(frames)
        else:
            residency.publish(frames, keys[: len(frames)])

    def check_accounts(self):
        residency, owners = self.residency, self.residency._owners
        assert set(owners._owner_of) == set(residency._key_of)
        assert Counter(owners._owner_of.values()) == +owners._num_used == held_by(residency)
        for theirs, queue in ((owners.queued, residency._queue), (owners.aside, residency._aside)):
            turns = {frame: turn for frames in theirs.values() for frame, turn in frames.items()}
            assert sorted(turns, key=turns.get) == list(queue), "one order, whoever owns the frames"
        assert residency._queue.keys() | residency._aside.keys() == residency._key_of.keys()
        assert owners._above == {one for one in owners._num_used if owners.room(one) < 0}
        places = [*residency._free, *self.frame_table.key_of, *self.frame_table.quarantine, *residency._leaving]
        assert sorted(set(places)) == list(range(NUM_FRAMES))


@settings(max_examples=300)
@given(steps=STEPS, share=st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_pages_when_tenants_do_what_they_like_then_below_its_share_nobody_loses_to_one_above(steps, share):
    run = Run(share)
    for step in steps:
        run.step(*step)


@given(steps=STEPS)
@example(
    steps=[
        ("fill", "", 1, 1, set()),
        ("fill", "", 2, 1, set()),
        *[("fill", "", 0, 1, set())] * 6,
        ("touch", "", 0, 1, {0, 1, 2, 4}),
        ("fill", "", 0, 6, set()),
    ]
)
@mock.patch.object(residency_module, "MOST_EXAMINED", 1)
def test_order_when_all_pages_are_one_tenants_then_it_is_that_of_the_plain_clock(steps):
    """Whatever its share is; but for the marks of what is looked at in advance, which depend on how many that are."""
    plain_table, shared_table = FakeFrameTable(), FakeFrameTable()
    pair = [(Residency(plain_table, NUM_FRAMES), plain_table), (shared(shared_table), shared_table)]
    for what, _, first, num_pages, frames in steps:
        for residency, frame_table in pair:
            match what:
                case "touch":
                    frame_table.touched |= frames & set(frame_table.key_of)
                case "pin":
                    frame_table.pinned = frames
                case "demote":
                    residency.demote(named("a", first, num_pages))
                case _:
                    fill(residency, named("a", first, num_pages))
        assert list(pair[0][0]._queue) == list(pair[1][0]._queue)
        assert pair[0][0]._key_of == pair[1][0]._key_of
