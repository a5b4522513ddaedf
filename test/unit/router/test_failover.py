# SPDX-License-Identifier: Apache-2.0
"""Servers that die, fall silent or refuse, below a router: every request is answered, or told why not."""

from __future__ import annotations

import asyncio
import json

import pytest
from test.unit.router.fake_server import FakeServer, running, until

from banyan.router.health import State


def events(body):
    return [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]


def is_whole(body, num_tokens):
    told = events(body)
    return [event.get("number") for event in told] == list(range(num_tokens)) and b"[DONE]" in body


def test_request_when_nobody_listens_then_another_server_answers():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")], probe_interval_s=30) as rig:
            await rig.servers[0].kill()
            for _ in range(2):
                status, _, body = await rig.ask(text="hi")
                assert (status, json.loads(body)["text"]) == (200, "b")
            assert rig.state(0) is State.DOWN
            assert rig.num_seen() == [0, 2]
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_request_when_its_server_dies_before_the_first_byte_then_another_answers(stream):
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b]) as rig:
            a.awake.clear()
            b.awake.clear()
            asked = [asyncio.create_task(rig.ask(text="hi", stream=stream)) for _ in range(2)]
            await until(lambda: rig.num_seen() == [1, 1])
            b.awake.set()
            await a.kill()
            answers = await asyncio.gather(*asked)
            assert [status for status, _, _ in answers] == [200, 200]
            assert all(b'"b"' in body for _, _, body in answers)
            assert b"banyan_router_retries_total 1.0" in (await rig.get("/metrics"))[1]
            rig.assert_idle()

    asyncio.run(scenario())


def test_stream_when_its_server_dies_in_the_middle_then_its_last_event_says_so():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b]) as rig:
            for server in (a, b):
                server.gate.clear()
            asked = [asyncio.create_task(rig.ask(text="hi", stream=True)) for _ in range(2)]
            await until(lambda: a.num_running and b.num_running)
            await asyncio.sleep(0.05)
            await a.kill()
            b.gate.set()
            bodies = sorted([body for _, _, body in await asyncio.gather(*asked)], key=lambda body: b"error" in body)
            assert is_whole(bodies[0], b.num_tokens)
            assert events(bodies[1])[0] == {"text": "a", "number": 0}
            assert events(bodies[1])[-1]["error"]["type"] == "server_lost"
            assert b"[DONE]" not in bodies[1]
            assert rig.num_seen() == [1, 1]
            rig.assert_idle()

    asyncio.run(scenario())


def test_load_when_one_of_two_servers_is_killed_then_every_request_ends_and_only_begun_streams_fail():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        a.num_tokens = b.num_tokens = 20
        async with running([a, b], max_in_flight=8, queue_timeout_s=15) as rig:
            asked = [asyncio.create_task(rig.ask(text="hi " * number, stream=True)) for number in range(80)]
            await until(lambda: len(a.seen) > 12)
            # Streams stop behind their first piece, which has time to arrive: some have begun on any machine.
            a.gate.clear()
            await until(lambda: a.num_running > 0)
            await asyncio.sleep(0.2)
            num_begun = a.num_running
            await a.kill()
            answers = await asyncio.gather(*asked)
            whole = [body for _, _, body in answers if is_whole(body, 20)]
            broken = [body for _, _, body in answers if b"server_lost" in body]
            assert [status for status, _, _ in answers] == [200] * 80
            assert len(whole) + len(broken) == 80
            assert 0 < len(broken) <= num_begun <= 8
            assert all(events(body)[-1]["error"]["code"] == 502 for body in broken)
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_its_server_falls_silent_then_it_is_given_up_and_another_answers():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b], probe_timeout_s=0.05) as rig:
            a.awake.clear()
            answers = await asyncio.gather(*(rig.ask(text="hi") for _ in range(2)))
            assert [json.loads(body)["text"] for _, _, body in answers] == ["b", "b"]
            assert rig.num_seen() == [1, 2]
            assert rig.state(0) is State.DOWN
            rig.assert_idle()

    asyncio.run(scenario())


def test_stream_when_its_server_falls_silent_then_it_ends_with_an_error():
    async def scenario():
        async with running([FakeServer("a")], probe_timeout_s=0.05, health_timeout_s=0.05) as rig:
            (a,) = rig.servers
            a.gate.clear()
            asked = asyncio.create_task(rig.ask(text="hi", stream=True))
            await until(lambda: a.num_running == 1)
            a.awake.clear()
            _, _, body = await asked
            assert "does not answer" in events(body)[-1]["error"]["message"]

    asyncio.run(scenario())


def test_request_when_nothing_comes_for_the_idle_timeout_then_it_fails_though_the_server_is_well():
    async def scenario():
        async with running([FakeServer("a")], idle_timeout_s=0.05, max_retries=0) as rig:
            rig.servers[0].gate.clear()
            status, _, body = await rig.ask(text="hi")
            assert status == 502 and "nothing came for 0.05 s" in json.loads(body)["error"]["message"]
            assert rig.state(0) is State.UP

    asyncio.run(scenario())


def test_request_when_every_server_dies_of_it_then_it_stops_after_the_retries_and_names_them():
    async def scenario():
        servers = [FakeServer(name) for name in "abc"]
        async with running(servers, max_retries=1) as rig:
            for server in servers:
                server.awake.clear()
            asked = asyncio.create_task(rig.ask(text="poison"))
            for _ in range(2):
                await until(lambda: any(server.num_running for server in servers))
                dying = next(server for server in servers if server.num_running)
                dying.num_running = 0
                await dying.kill()
            status, _, body = await asked
            message = json.loads(body)["error"]["message"]
            assert status == 502
            assert sum(server.url in message for server in servers) == 2
            assert sum(rig.num_seen()) == 2

    asyncio.run(scenario())


def test_request_when_a_server_answers_503_then_another_is_asked():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            rig.servers[0].status = 503
            answers = [await rig.ask(text="hi") for _ in range(4)]
            assert [json.loads(body)["text"] for _, _, body in answers] == ["b"] * 4

    asyncio.run(scenario())


def test_request_when_every_server_answers_503_then_the_last_answer_is_passed_on_with_retry_after():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            for server in rig.servers:
                server.status = 503
            status, headers, body = await rig.ask(text="hi")
            assert status == 503 and b"says 503" in body and int(headers["retry-after"]) >= 1
            assert rig.num_seen() == [1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 500])
def test_request_when_a_server_answers_otherwise_then_that_is_the_answer(status):
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            for server in rig.servers:
                server.status = status
            answered, _, body = await rig.ask(text="hi")
            assert answered == status and b"says" in body
            assert sum(rig.num_seen()) == 1

    asyncio.run(scenario())


def test_server_when_it_comes_back_then_it_is_used_again():
    async def scenario():
        async with running([FakeServer("a")], queue_timeout_s=10) as rig:
            (a,) = rig.servers
            await a.kill()
            await until(lambda: rig.state(0) is State.DOWN)
            asked = asyncio.create_task(rig.ask(text="hi"))
            await until(lambda: rig.router.forwarder.admission.num_waiting == 1)
            await a.come_back()
            assert (await asked)[0] == 200

    asyncio.run(scenario())
