# SPDX-License-Identifier: Apache-2.0
"""Probes and subscriptions go on, whatever a server makes of them."""

from __future__ import annotations

import asyncio

from test.unit.router.fake_server import FakeServer, running, until

from banyan.router import tasks as module
from banyan.router.events import BlockStored
from banyan.router.tasks import Tasks


def test_work_when_it_ends_by_a_fault_then_it_begins_again_and_one_line_says_so(monkeypatch, caplog):
    async def scenario():
        monkeypatch.setattr(module, "PAUSE_S", 0.001)
        counted, lost = [], []
        tasks = Tasks(counted.append)

        async def work():
            if len(lost) < 3:
                raise ZeroDivisionError
            await asyncio.Event().wait()

        task = tasks.start("a probe", work, lambda: lost.append(1))
        await until(lambda: len(lost) == 3)
        await asyncio.sleep(0.01)
        assert counted == ["a probe"] * 3 and not task.done()
        assert len([line for line in caplog.messages if "a probe has ended by a fault" in line]) == 1
        await tasks.cancel()
        assert task.cancelled()

    asyncio.run(scenario())


def test_feed_when_a_fault_ends_it_then_its_blocks_are_forgotten_and_it_listens_again(monkeypatch):
    async def scenario():
        monkeypatch.setattr(module, "PAUSE_S", 0.01)
        server = FakeServer("a", events=True)
        async with running([server]) as rig:
            (feed,) = rig.router.fleet.servers[0].feeds
            await server.publishers[0].send(BlockStored([1, 2]))
            await until(lambda: len(feed.blocks) == 2)
            apply = feed.apply
            with monkeypatch.context() as patch:
                patch.setattr(feed, "apply", lambda seq, batch: 1 // 0)
                await server.publishers[0].send(BlockStored([3]), lose=False)
                await until(lambda: not len(feed.blocks))
            assert feed.apply == apply
            await until(lambda: len(feed.blocks) == 3)
            assert b'tasks_ended_total{task="a feed of KV events"}' in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())


def test_server_when_it_says_what_no_server_says_then_it_stays_down_and_the_probes_go_on():
    async def scenario():
        bad, good = FakeServer("a"), FakeServer("b")
        bad.more_info = {"dp_size": 10**9}
        async with running([good, bad], is_up=False) as rig:
            await until(lambda: rig.router.fleet.servers[0].takes_requests)
            state = rig.router.fleet.servers[1]
            await until(lambda: "server_info is not as SGLang" in state.health.last_error)
            bad.more_info = {}
            await until(lambda: state.takes_requests)
            assert b"tasks_ended_total{" not in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())


def test_feed_when_a_batch_has_a_number_below_zero_then_it_is_passed_over_and_no_fault_ends_it():
    async def scenario():
        server = FakeServer("a", events=True)
        publisher = server.publishers[0]
        async with running([server]) as rig:
            feed = rig.router.fleet.servers[0].feeds[0]
            await publisher.send(BlockStored([1]))
            await until(lambda: len(feed.blocks) == 1)
            below = (-5).to_bytes(8, "big", signed=True)
            await publisher._pub.send_multipart((b"", below, publisher.sent[0]))
            await until(lambda: feed.next_seq is None)
            await publisher.send(BlockStored([2]))
            await until(lambda: len(feed.blocks) == 2)
            assert b"banyan_router_tasks_ended_total{" not in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())
