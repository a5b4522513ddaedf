# SPDX-License-Identifier: Apache-2.0
"""What a rank has told before somebody listens, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio
from test.unit.router.fake_server import Publisher

from banyan.router.description import Source
from banyan.router.events import BlockStored, EventFeed
from banyan.router.subscription import HOLE_TRIES, subscribe

NUM_BATCHES = 5_000
"""Five times what a socket of ZeroMQ takes by itself."""


class Dropping(Publisher):
    """The first replays leave a batch in the middle out, as a socket does that has no room."""

    def __init__(self, num_drops):
        super().__init__()
        self._num_drops = num_drops
        router = self._router
        send = router.send_multipart

        async def send_or_drop(message):
            is_middle = int.from_bytes(message[3], "big") == NUM_BATCHES // 2
            if is_middle and self._num_drops:
                self._num_drops -= 1
                return
            await send(message)

        router.send_multipart = send_or_drop


def told(num_drops):
    """The feed of who comes when all was told, and how much it had to read of it."""

    async def main():
        publisher, feed = Dropping(num_drops), EventFeed()
        for number in range(NUM_BATCHES):
            await publisher.send(BlockStored([number]), lose=True)
        source = Source(0, f"tcp://127.0.0.1:{publisher.port}", "", f"tcp://127.0.0.1:{publisher.replay_port}")
        context = zmq.asyncio.Context()
        listening = asyncio.create_task(subscribe(context, source, feed, lambda: None))
        async with asyncio.timeout(30):
            while feed.next_seq != NUM_BATCHES:
                await asyncio.sleep(0.01)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await publisher.close()
        context.destroy(linger=0)
        return feed

    return asyncio.run(main())


@pytest.mark.parametrize("num_drops", [0, 1, HOLE_TRIES])
def test_replay_when_it_is_long_or_a_batch_of_it_is_dropped_then_all_of_it_is_known(num_drops):
    feed = told(num_drops)
    assert feed.num_holes == 0 and feed.is_whole
    assert all(number in feed.blocks for number in range(NUM_BATCHES))


def test_replay_when_a_batch_is_always_dropped_then_what_comes_behind_it_is_known_and_no_more():
    feed = told(HOLE_TRIES + 1)
    assert feed.num_holes == 1 and not feed.is_whole
    assert NUM_BATCHES // 2 - 1 not in feed.blocks and NUM_BATCHES - 1 in feed.blocks
