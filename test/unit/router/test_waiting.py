# SPDX-License-Identifier: Apache-2.0
"""The router's queue passes nobody over, whatever is cached of a prompt."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.router.waiting import Admission


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.lists(st.integers(1, 4), max_size=30), st.integers(0, 4))
def test_queue_when_prompts_are_cold_and_warm_then_all_are_placed_in_the_order_in_which_they_came(cold, freed, room):
    async def scenario():
        placed, room_left = [], [room]

        def take(number):
            # As the fleet: a place wherever there is one, chosen by what is cached.
            if not room_left[0]:
                return None
            room_left[0] -= 1
            placed.append(number)
            return number

        queue = Admission(len(cold), lambda place: None)
        entering = [asyncio.ensure_future(queue.enter(lambda n=n: take(n), 60)) for n in range(len(cold))]
        await asyncio.sleep(0)
        for num_freed in [*freed, len(cold)]:
            room_left[0] += num_freed
            queue.wake()
        await asyncio.gather(*entering)
        assert placed == list(range(len(cold)))

    asyncio.run(scenario())


def test_queue_when_one_waits_for_a_full_server_then_those_for_others_do_not_wait_behind_it():
    async def scenario():
        room = {"a": 0, "b": 1}

        def take(servers):
            server = next((one for one in servers if room[one]), None)
            if server is not None:
                room[server] -= 1
            return server

        queue = Admission(8, lambda place: None)

        def enter(*servers):
            home = servers[0] if len(servers) == 1 else None
            return asyncio.ensure_future(queue.enter(lambda: take(servers), 60, home))

        bound, free, behind = enter("a"), enter("a", "b"), enter("a")
        last = enter("a", "b")
        await asyncio.sleep(0)
        assert await free == "b" and queue.num_waiting == 3
        room["b"] += 1
        queue.wake()
        assert await last == "b" and not bound.done()
        room["a"] += 1
        queue.wake()
        assert await bound == "a" and not behind.done()
        room["a"] += 1
        queue.wake()
        assert await behind == "a" and queue.num_waiting == 0

    asyncio.run(scenario())


def test_queue_when_who_is_in_front_leaves_then_those_behind_get_what_he_could_not_take():
    async def scenario():
        queue = Admission(8, lambda place: None)
        room = {"a": 1, "b": 0}

        def take(servers):
            return next((one for one in servers if room[one]), None)

        first = asyncio.ensure_future(queue.enter(lambda: take("b"), 60))
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(queue.enter(lambda: take("ab"), 60))
        await asyncio.sleep(0)
        assert queue.num_waiting == 2
        first.cancel()
        assert await asyncio.wait_for(behind, 5) == "a"

    asyncio.run(scenario())


def test_queue_when_nobody_has_room_then_who_waits_for_one_server_is_passed_over_by_nobody_for_it():
    async def scenario():
        room, placed = [0], []

        def take(number):
            if not room[0]:
                return None
            room[0] -= 1
            placed.append(number)
            return number

        queue = Admission(8, lambda place: None)
        servers = ["a", None, "a", None]
        entering = [
            asyncio.ensure_future(queue.enter(lambda n=n: take(n), 60, server)) for n, server in enumerate(servers)
        ]
        await asyncio.sleep(0)
        for _ in servers:
            room[0] += 1
            queue.wake()
        await asyncio.gather(*entering)
        assert placed == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_queue_when_taking_a_place_fails_for_one_then_it_has_the_fault_and_those_behind_have_their_places():
    async def scenario():
        has_room, given_back = [False], []

        def fails():
            if has_room[0]:
                raise ZeroDivisionError
            return None

        queue = Admission(8, given_back.append)
        failing = asyncio.ensure_future(queue.enter(fails, 60))
        behind = asyncio.ensure_future(queue.enter(lambda: "a" if has_room[0] else None, 60))
        await asyncio.sleep(0)
        has_room[0] = True
        queue.wake()
        assert await behind == "a" and queue.num_waiting == 0 and not given_back
        with pytest.raises(ZeroDivisionError):
            await failing

    asyncio.run(scenario())
