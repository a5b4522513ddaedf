# SPDX-License-Identifier: Apache-2.0
"""What a rank has told before somebody listens, over real sockets."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from itertools import pairwise

import msgspec
import pytest
import zmq.asyncio
from test.unit.router.fake_server import Publisher, until

from banyan.router.description import Source
from banyan.router.events import BlockStored, EventBatch, EventFeed
from banyan.router.load_feed import LoadStat, subscribe_to_load
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


class Path:
    """What connects to it reaches ``port``, as long as it is not mute: then nobody hears anything, the end included."""

    def __init__(self, port):
        self.port, self.num_came, self.is_mute, self._ways = port, 0, False, []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *why):
        self._server.close()
        for one in self._ways:
            one.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)

    async def _came(self, reader, writer):
        self.num_came, self.is_mute = self.num_came + 1, False
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        ways = ((reader, there_writer), (there_reader, writer))
        self._ways += [asyncio.create_task(self._pass_on(*way, self.num_came)) for way in ways]

    async def _pass_on(self, reader, writer, number):
        while data := await reader.read(65536):
            if self.is_mute or number < self.num_came:
                continue
            writer.write(data)


def test_feeds_when_their_connections_end_without_a_word_then_they_are_made_anew(monkeypatch):
    monkeypatch.setattr("banyan.transport.lost_peers.HEARTBEAT_MS", 100)
    monkeypatch.setattr("banyan.transport.lost_peers.SILENCE_MS", 500)

    async def main():
        publisher, feed, loads, context = Publisher(), EventFeed(), [], zmq.asyncio.Context()
        events_path, loads_path = Path(publisher.port), Path(publisher.load_port)
        async with asyncio.timeout(30), events_path as port, loads_path as load_port:
            source = Source(0, f"tcp://127.0.0.1:{port}", "", f"tcp://127.0.0.1:{publisher.replay_port}")
            load_source = Source(0, f"tcp://127.0.0.1:{load_port}", "load")
            listening = [
                asyncio.create_task(subscribe(context, source, feed, lambda: None)),
                asyncio.create_task(subscribe_to_load(context, load_source, loads.append, lambda: 1.0)),
            ]
            await until(lambda: events_path.num_came == loads_path.num_came == 1)
            await asyncio.sleep(1.5)
            assert events_path.num_came == loads_path.num_came == 1, "those that are idle are kept"
            events_path.is_mute = loads_path.is_mute = True
            await publisher.send(BlockStored([1]))
            await until(lambda: events_path.num_came == loads_path.num_came == 2)
            while 1 not in feed.blocks or not loads:
                # Who has just come has missed what was sent before; of events it asks for that again.
                await publisher.send(BlockStored([2]))
                await publisher.tell_load(msgspec.msgpack.encode(LoadStat(1, 2, 3, 4)))
                await asyncio.sleep(0.05)
            for one in listening:
                one.cancel()
            await asyncio.gather(*listening, return_exceptions=True)
        await publisher.close()
        context.destroy(linger=0)
        assert feed.num_holes == 0

    asyncio.run(main())


class Full:
    """A context of ZeroMQ and its sockets: their messages are there already, so that nobody waits for one."""

    def __init__(self, messages):
        self.messages = {kind: deque(those) for kind, those in messages.items()}

    def socket(self, kind):
        self.kind = kind
        return self

    def __enter__(self):
        self.coming = self.messages[self.kind]
        return self

    def __exit__(self, *why):
        pass

    def set(self, option, value):
        if option == zmq.RCVHWM:
            self.most_waiting = value

    setsockopt = set

    def connect(self, where):
        pass

    subscribe = connect

    async def send_multipart(self, parts):
        pass

    async def recv_multipart(self):
        return self.coming.popleft() if self.coming else await asyncio.Event().wait()


def batch(seq):
    return seq.to_bytes(8, "big", signed=True), msgspec.msgpack.encode(EventBatch(1.0, [BlockStored([seq])]))


NUM_QUEUED = 50
QUEUED = {
    "replay": {zmq.DEALER: [(b"", b"", *batch(seq)) for seq in range(NUM_QUEUED)], zmq.SUB: []},
    "live": {zmq.SUB: [(b"", *batch(seq)) for seq in range(NUM_QUEUED)]},
    "no events": {zmq.SUB: [(b"", b"", b"")] * NUM_QUEUED},
    "loads": {zmq.SUB: [(b"", b"", msgspec.msgpack.encode(LoadStat(1, 2, 3, 4)))] * NUM_QUEUED},
    "no loads": {zmq.SUB: [(b"", b"", b"")] * NUM_QUEUED},
}


@pytest.mark.parametrize("what", QUEUED)
def test_messages_when_many_have_come_then_others_have_their_turn_between_each_two(what):
    context, turns = Full(QUEUED[what]), [NUM_QUEUED]

    async def main():
        replay = "tcp://x" if what == "replay" else None
        if what.endswith("loads"):
            reading = subscribe_to_load(context, Source(0, "tcp://x", ""), lambda report: None, lambda: 1.0)
        else:
            reading = subscribe(context, Source(0, "tcp://x", "", replay), EventFeed(), lambda: None)
        reader = asyncio.create_task(reading)
        (messages,) = [those for those in context.messages.values() if those]
        while messages:
            await asyncio.sleep(0)
            turns.append(len(messages))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    asyncio.run(main())
    assert all(before - now <= 1 for before, now in pairwise(turns))


def test_replay_when_there_is_no_socket_for_it_then_the_feed_goes_on_with_what_comes():
    class Used(Full):
        def socket(self, kind):
            if kind == zmq.DEALER:
                raise zmq.ZMQError(errno.EMFILE)
            return super().socket(kind)

    context, feed = Used({zmq.SUB: [(b"", *batch(seq)) for seq in (3, 4, 9)]}), EventFeed()

    async def main():
        listening = asyncio.create_task(subscribe(context, Source(0, "tcp://x", "", "tcp://x"), feed, lambda: None))
        await until(lambda: listening.done() or feed.next_seq == 10)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    asyncio.run(main())
    assert 9 in feed.blocks and feed.num_holes == 1


def test_replay_when_a_publisher_sends_without_end_then_so_many_batches_wait_and_no_more():
    context = Full(QUEUED["replay"])

    async def main():
        reading = subscribe(context, Source(0, "tcp://x", "", "tcp://x"), EventFeed(), lambda: None)
        reader = asyncio.create_task(reading)
        while context.messages[zmq.DEALER]:
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    asyncio.run(main())
    assert 10_000 < context.most_waiting < 1 << 20, "more than SGLang's publisher keeps"
