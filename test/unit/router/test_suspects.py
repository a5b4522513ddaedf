# SPDX-License-Identifier: Apache-2.0
"""Requests that are lost together with their server: which of them may visit another."""

from __future__ import annotations

import asyncio

import pytest

from banyan.router import suspects as module
from banyan.router.suspects import REMEMBERED_S, Held, Suspects

PATIENCE_S = 5.0


class Rig:
    """Suspects of servers that are dead unless they are in ``well``."""

    def __init__(self, well=()):
        self.well, self.now_s = set(well), 0.0
        self.suspects = Suspects(self._is_well, lambda: self.now_s)

    async def _is_well(self, server):
        return server in self.well

    def sent(self, *bodies):
        made = [self.suspects.enters(body) for body in bodies]
        for suspect in made:
            self.now_s += 1
            self.suspects.sent(suspect)
        return made

    def lost(self, server, suspects, patience_s=PATIENCE_S):
        """What is said of each that was lost there, one task for each."""
        return [asyncio.create_task(self.suspects.may_go_on(one, [server], patience_s)) for one in suspects]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "TOGETHER_S", 0.01)
    monkeypatch.setattr(module, "TRIAL_S", 60.0)


def num_free(tasks):
    return sum(task.done() and task.result() is None for task in tasks)


async def settled(tasks, num_done):
    await asyncio.sleep(0.03)
    while sum(task.done() for task in tasks) < num_done:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.01)
    assert sum(task.done() for task in tasks) == num_done


def test_request_when_it_was_alone_with_its_server_then_it_goes_nowhere_else():
    async def scenario():
        rig = Rig()
        assert await rig.lost("a", rig.sent(b"1"))[0] is Held.LAST

    asyncio.run(scenario())


def test_requests_when_their_server_is_well_then_all_go_on_at_once_and_none_is_remembered():
    async def scenario():
        rig = Rig(well="a")
        assert await asyncio.gather(*rig.lost("a", rig.sent(b"1", b"2"))) == [None, None]
        assert [one.num_lost for one in rig.sent(b"1", b"2")] == [0, 0]

    asyncio.run(scenario())


def test_requests_when_they_are_lost_together_then_one_is_tried_and_then_two_and_the_last_never():
    async def scenario():
        rig = Rig()
        lost = rig.sent(*(b"%d" % number for number in range(6)))
        said = rig.lost("a", lost)
        await settled(said, 2)
        assert said[-1].result() is Held.LAST and said[0].result() is None
        rig.suspects.answered(lost[0])
        await settled(said, 4)
        for one in lost[1:3]:
            rig.suspects.left(one)
        await settled(said, 6)
        assert num_free(said) == 5

    asyncio.run(scenario())


def test_requests_when_one_on_trial_lasts_then_the_next_does_not_wait_for_its_answer(monkeypatch):
    async def scenario():
        monkeypatch.setattr(module, "TRIAL_S", 0.02)
        rig = Rig()
        lost = rig.sent(b"0", b"1", b"2")
        said = rig.lost("a", lost)
        await settled(said, 2)
        rig.suspects.sent(lost[0])
        await settled(said, 3)

    asyncio.run(scenario())


def test_request_when_it_is_lost_again_then_it_is_held_and_the_others_of_both_groups_are_free():
    async def scenario():
        rig = Rig()
        killer, *others = rig.sent(b"killer", b"1", b"2", b"3", b"4")
        first = rig.lost("a", [killer, *others])
        await settled(first, 2)
        rig.suspects.sent(killer)
        beside = rig.sent(b"beside", b"beside, and last")
        second = rig.lost("b", [killer, *beside])
        assert await asyncio.gather(*second) == [Held.AGAIN, None, None]
        await settled(first, 5)
        assert num_free(first) == 4
        assert rig.suspects.is_barred(rig.suspects.enters(b"killer"))
        assert not rig.suspects.is_barred(rig.suspects.enters(b"beside, and last"))

    asyncio.run(scenario())


def test_stream_when_it_broke_with_its_server_then_it_may_have_been_the_last():
    async def scenario():
        rig = Rig()
        waiting, streaming = rig.sent(b"waiting", b"streaming")
        rig.suspects.lost(streaming, ["a"])
        assert await rig.lost("a", [waiting])[0] is None

    asyncio.run(scenario())


def test_request_when_its_turn_does_not_come_then_it_is_held():
    async def scenario():
        rig = Rig()
        said = rig.lost("a", rig.sent(b"0", b"1", b"2"), patience_s=0.05)
        assert await asyncio.gather(*said) == [None, Held.LATE, Held.LAST]

    asyncio.run(scenario())


def test_request_of_a_pair_when_one_of_its_servers_is_dead_then_it_is_a_suspect():
    async def scenario():
        rig = Rig(well="p")
        (one,) = rig.sent(b"1")
        assert await rig.suspects.may_go_on(one, ["p", "d"], PATIENCE_S) is Held.LAST

    asyncio.run(scenario())


def test_body_when_it_comes_again_then_it_counts_as_lost_before_until_it_is_answered_or_time_is_over():
    async def scenario():
        rig = Rig()
        await rig.lost("a", rig.sent(b"1"))[0]
        again = rig.suspects.enters(b"1")
        assert again.num_lost == 1 and not rig.suspects.is_barred(again)
        rig.suspects.answered(again)
        assert rig.suspects.enters(b"1").num_lost == 0
        await rig.lost("a", rig.sent(b"1"))[0]
        rig.now_s += REMEMBERED_S + 1
        assert rig.suspects.enters(b"1").num_lost == 0

    asyncio.run(scenario())


def test_bodies_when_many_are_held_then_so_many_are_remembered(monkeypatch):
    async def scenario():
        rig = Rig()
        for number in range(3):
            await rig.lost("a", rig.sent(b"%d" % number))[0]
        assert [rig.suspects.enters(b"%d" % number).num_lost for number in range(3)] == [0, 1, 1]

    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    asyncio.run(scenario())
