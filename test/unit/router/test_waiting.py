# SPDX-License-Identifier: Apache-2.0
"""The router's queue passes nobody over, whatever is cached of a prompt."""

from __future__ import annotations

import asyncio

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
