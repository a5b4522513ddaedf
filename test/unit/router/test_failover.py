# SPDX-License-Identifier: Apache-2.0
"""Servers that die, fall silent or refuse, below a router: every request is answered, or told why not."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct

import pytest
from test.unit.router.fake_server import FakeServer, running, until

from banyan.router import app, suspects
from banyan.router.bodies import Answers
from banyan.router.health import Health, Probe, State
from banyan.router.upstream import Attempt, Lost, at


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


def test_connection_when_it_has_idled_then_the_router_closes_it_before_its_server_does(monkeypatch):
    monkeypatch.setattr(app, "IDLE_S", 0.2)

    async def scenario():
        a = FakeServer("a")
        a.config.timeout_keep_alive = 60
        async with running([a], probe_interval_s=60) as rig:
            assert (await rig.ask(text="hi"))[0] == 200
            async with asyncio.timeout(5):
                await until(lambda: not a._server.server_state.connections)

    asyncio.run(scenario())


def outcomes(answers):
    """Who answered each, by its name; for none the status."""
    return [next((name for name in "abc" if f'"{name}"'.encode() in body), status) for status, _, body in answers]


async def ask_in_turn(rig, num_requests, **fields):
    """So many requests, each sent on before the next."""
    asked, num_before = [], sum(rig.num_seen())
    for number in range(num_requests):
        asked.append(asyncio.create_task(rig.ask(text=f"hi {number}", **fields)))
        await until(lambda: sum(rig.num_seen()) >= num_before + len(asked))
    return asked


@pytest.mark.parametrize("stream", [False, True])
def test_requests_when_their_server_dies_before_the_first_byte_then_another_answers_all_but_the_last(stream):
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b], probe_timeout_s=10) as rig:
            a.awake.clear()
            b.awake.clear()
            asked = await ask_in_turn(rig, 6, stream=stream)
            b.awake.set()
            await a.kill()
            assert sorted(map(str, outcomes(await asyncio.gather(*asked)))) == ["502", *"bbbbb"]
            (last,) = [answer for answer in await asyncio.gather(*asked) if answer[0] == 502]
            assert last[1]["x-should-retry"] == "false" and json.loads(last[2])["error"]["type"] == "server_lost"
            metrics = (await rig.get("/metrics"))[1]
            assert b"banyan_router_retries_total 2.0" in metrics
            assert b'banyan_router_requests_not_retried_total{reason="last"} 1.0' in metrics
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_its_server_dies_of_it_then_no_other_server_sees_it():
    async def scenario():
        servers = [FakeServer(name) for name in "abc"]
        async with running(servers, max_retries=5) as rig:
            status, headers, body = await rig.ask(text="poison")
            assert status == 502 and headers["x-should-retry"] == "false"
            assert "may have ended because of it" in json.loads(body)["error"]["message"]
            assert sum(server.is_dead for server in servers) == 1
            assert outcomes([await rig.ask(text="hi") for _ in range(4)]).count(502) == 0

    asyncio.run(scenario())


def test_request_when_its_method_may_be_sent_twice_and_its_server_dies_of_it_then_no_other_server_sees_it():
    async def scenario():
        servers = [FakeServer(name) for name in "abc"]
        async with running(servers, max_retries=5) as rig:
            async with rig.client.put(f"{rig.served.url}/generate", json={"text": "poison"}) as response:
                assert response.status == 502 and response.headers["x-should-retry"] == "false"
            assert sum(server.is_dead for server in servers) == 1 and sum(rig.num_seen()) == 1

    asyncio.run(scenario())


def test_request_when_its_method_may_be_sent_twice_and_its_connection_breaks_then_the_server_sees_it_once():
    async def scenario():
        async with running([FakeServer("a")], max_retries=0) as rig:
            (server,) = rig.servers
            server.gate.clear()
            asked = asyncio.create_task(rig.client.put(f"{rig.served.url}/generate", json={"text": "hi"}))
            await until(lambda: server.num_running)
            rig.drop_connections(server)
            assert (await asked).status == 502 and rig.num_seen() == [1]

    asyncio.run(scenario())


def test_request_to_all_servers_when_a_connection_breaks_then_that_server_sees_it_once():
    num_seen = 0

    async def breaks(reader, writer):
        nonlocal num_seen
        num_seen += (await reader.readuntil(b"\r\n\r\n")).startswith(b"PUT")
        writer.transport.abort()

    async def scenario():
        async with await asyncio.start_server(breaks, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with running([FakeServer("a")], is_up=False, instead={"servers": (url,)}) as rig:
                async with rig.client.put(f"{rig.served.url}/set_internal_state", json={}) as response:
                    assert response.status == 502 and "did not answer" in await response.text()
        assert num_seen == 1

    asyncio.run(scenario())


def test_request_when_clients_send_it_again_and_again_then_two_servers_are_all_that_die_of_it():
    async def scenario():
        servers = [FakeServer(name) for name in "abc"]
        async with running(servers) as rig:
            answers = [await rig.ask(text="poison") for _ in range(4)]
            assert [status for status, _, _ in answers] == [502] * 4
            assert sum(server.is_dead for server in servers) == 2
            assert (await rig.ask(text="hi"))[0] == 200

    asyncio.run(scenario())


def test_requests_when_a_killer_is_among_them_then_it_is_found_and_all_but_the_last_are_answered(monkeypatch):
    # On a busy machine connections take longer to break.
    monkeypatch.setattr(suspects, "TOGETHER_S", 1.0)
    monkeypatch.setattr(suspects, "TRIAL_S", 0.2)

    async def scenario():
        servers = [FakeServer(name) for name in "abc"]
        a, *others = servers
        async with running(servers, max_retries=3, probe_timeout_s=10) as rig:
            for other in others:
                await rig.post(f"/router/drain?server={other.url}")
            a.gate.clear()
            a.dies.clear()
            asked = await ask_in_turn(rig, 3)
            killer = asyncio.create_task(rig.ask(text="poison"))
            await until(lambda: len(a.seen) == 4)
            # What comes after it hides it: it is not the last.
            asked += await ask_in_turn(rig, 3)
            await until(lambda: len(a.seen) == 7)
            for other in others:
                # The killer takes its time there: who comes after it, or is on trial beside it, is answered first.
                other.dies.clear()
                await rig.post(f"/router/resume?server={other.url}")
            a.dies.set()
            answers = await asyncio.gather(*asked)
            for other in others:
                other.dies.set()
            assert (await killer)[0] == 502
            assert [server.is_dead for server in servers].count(True) == 2
            assert [status for status, _, _ in answers] == [200] * 5 + [502]
            rig.assert_idle()

    asyncio.run(scenario())


async def under_way_at(rig):
    """One request that is not answered yet: its task, the server that has it, and the other one."""
    for server in rig.servers:
        server.gate.clear()
    asked = asyncio.create_task(rig.ask(text="hi"))
    await until(lambda: any(server.num_running for server in rig.servers))
    for server in rig.servers:
        if not server.num_running:
            server.gate.set()
    return asked, *sorted(rig.servers, key=lambda server: -server.num_running)


def test_request_when_its_connection_breaks_and_the_server_is_well_then_it_is_tried_again():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            asked, victim, other = await under_way_at(rig)
            rig.drop_connections(victim)
            assert outcomes([await asked]) == [other.name]
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("num_servers", [1, 2])
def test_request_when_it_comes_to_a_server_again_then_it_has_another_id_there_and_only_there(num_servers):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"[:num_servers]]) as rig:
            for server in rig.servers:
                server.gate.clear()
            asked = asyncio.create_task(rig.ask(text="hi", rid="mine"))
            await until(lambda: any(server.num_running for server in rig.servers))
            rig.drop_connections(next(server for server in rig.servers if server.num_running))
            await until(lambda: sum(rig.num_seen()) == 2)
            for server in rig.servers:
                server.gate.set()
            assert (await asked)[0] == 200
            ids = [json.loads(body)["rid"] for server in rig.servers for body, _ in server.seen]
            assert len(set(ids)) == (2 if num_servers == 1 else 1) and ids[0] == "mine"

    asyncio.run(scenario())


def test_request_when_its_server_was_drained_before_it_ended_then_it_is_tried_again():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            asked, victim, other = await under_way_at(rig)
            assert (await rig.post(f"/router/drain?server={victim.url}"))[0] == 200
            await victim.kill()
            assert outcomes([await asked]) == [other.name]

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


def test_stream_when_its_server_goes_on_with_what_is_no_chunk_then_its_last_event_says_so():
    async def scenario():
        async with running([FakeServer("a")], probe_interval_s=60) as rig:
            (a,) = rig.servers
            a.gate.clear()
            async with rig.client.post(f"{rig.served.url}/generate", json={"stream": True}) as response:
                first = await response.content.readuntil(b"\n\n")
                rig.spoil_answers(a)
                told = events(first + await response.read())
            assert told[0]["number"] == 0 and told[-1]["error"]["type"] == "server_lost"
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_its_server_goes_on_with_what_is_no_chunk_then_another_one_answers():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b], probe_interval_s=60) as rig:
            for server in (a, b):
                server.says["/generate"] = (200, "application/json", b"{", asyncio.Event())
            (asked,) = await ask_in_turn(rig, 1)
            bad, other = (a, b) if a.seen else (b, a)
            del other.says["/generate"]
            (give_up,) = (one for server in rig.router.all_servers for one in server.in_flight.values())
            await until(lambda: give_up.__self__.status == 200)
            rig.spoil_answers(bad)
            assert outcomes([await asked]) == [other.name]
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("pause_s", [0, 0.01], ids=["just-now", "before"])
def test_stream_when_what_is_no_chunk_has_ended_its_connection_then_who_asks_for_more_hears_so(pause_s):
    async def scenario():
        async with running([FakeServer("a")], probe_interval_s=60) as rig:
            (a,) = rig.servers
            a.gate.clear()
            attempt = Attempt(rig.client, Answers(rig.router._bodies), idle_timeout_s=60)
            await attempt.open(at(a.url, "/generate"), b'{"stream": true}', {})
            protocol = attempt._response.connection.protocol
            rig.spoil_answers(a)
            while protocol.connected:
                await asyncio.sleep(pause_s)
            with pytest.raises(Lost):
                await attempt.read()
            attempt.close()

    asyncio.run(scenario())


def test_connection_when_its_server_breaks_it_between_two_answers_then_nothing_is_logged():
    async def scenario():
        failed = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
        async with running([FakeServer("a")], probe_interval_s=60) as rig:
            (a,) = rig.servers
            assert is_whole((await rig.ask(text="hi", stream=True))[2], a.num_tokens)
            for connection in list(a._server.server_state.connections):
                reset = connection.transport.get_extra_info("socket")
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.transport.abort()
            await asyncio.sleep(0.05)
            gc.collect()
            assert (await rig.ask(text="hi"))[0] == 200
        assert not failed

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


def test_requests_when_their_server_falls_silent_then_they_are_given_up_and_another_answers_all_but_the_last():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b], probe_timeout_s=0.1) as rig:
            a.gate.clear()
            asked = await ask_in_turn(rig, 4)
            a.awake.clear()
            assert sorted(map(str, outcomes(await asyncio.gather(*asked)))) == ["502", "b", "b", "b"]
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


def test_stream_when_its_server_does_not_answer_probes_and_more_of_it_still_comes_then_it_goes_on():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        a.num_tokens = b.num_tokens = 400
        async with running([a, b], probe_timeout_s=0.4) as rig:
            (asked,) = await ask_in_turn(rig, 1, stream=True)
            slow, other = (a, b) if a.seen else (b, a)
            slow.awake.clear()
            await until(lambda: rig.state([a, b].index(slow)) is State.DOWN)
            assert outcomes([await rig.ask(text="hi") for _ in range(2)]) == [other.name] * 2
            assert is_whole((await asked)[2], 400)
            rig.assert_idle()

    asyncio.run(scenario())


def test_stream_when_its_server_is_told_to_end_then_it_comes_whole_and_new_requests_go_elsewhere():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b], health_interval_s=0.02) as rig:
            a.gate.clear()
            (asked,) = await ask_in_turn(rig, 1, stream=True)
            a.is_ending = True
            await until(lambda: rig.state(0) is State.DOWN)
            num_looks = a.num_looks
            await until(lambda: a.num_looks > num_looks + 10)
            assert outcomes([await rig.ask(text="hi") for _ in range(3)]) == ["b", "b", "b"]
            a.gate.set()
            assert is_whole((await asked)[2], a.num_tokens)
            a.is_ending = False
            await until(lambda: rig.state(0) is State.UP)

    asyncio.run(scenario())


def test_requests_when_a_server_that_ends_is_killed_then_none_is_to_blame():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b], health_interval_s=0.02) as rig:
            a.awake.clear()
            b.awake.clear()
            asked = await ask_in_turn(rig, 4)
            a.is_ending = True
            a.awake.set()
            a.gate.clear()
            await until(lambda: rig.state(0) is State.DOWN)
            b.awake.set()
            await a.kill()
            assert set(outcomes(await asyncio.gather(*asked))) == {"b"}

    asyncio.run(scenario())


def test_health_when_an_engine_did_not_answer_before_its_server_was_told_to_end_then_something_may_be_to_blame():
    for num_failures in (0, 1):
        health = Health(3)
        health.came_up()
        for _ in range(num_failures):
            health.failed(Probe.ENGINE, "it does not answer")
        health.ends("it ends")
        assert health.is_ending == (num_failures == 0) and health.state is State.DOWN
        health.failed(Probe.ENGINE, "it is slow")
        health.ends("it ends")
        assert health.is_ending == (num_failures == 0)


def test_stream_when_its_server_was_started_anew_without_a_word_then_it_ends_with_an_error():
    async def scenario():
        async with running([FakeServer("a")], health_interval_s=0.02) as rig:
            (a,) = rig.servers
            a.gate.clear()
            asked = asyncio.create_task(rig.ask(text="hi", stream=True))
            await until(lambda: a.num_running == 1)
            a.is_ending = True
            await until(lambda: rig.state(0) is State.DOWN)
            a.more_info = {"startup_time": {"total": "another"}}
            a.is_ending = False
            assert "started anew" in events((await asked)[2])[-1]["error"]["message"]

    asyncio.run(scenario())


def test_request_when_nothing_comes_for_the_idle_timeout_then_it_fails_though_the_server_is_well():
    async def scenario():
        async with running([FakeServer("a")], idle_timeout_s=0.05, max_retries=0) as rig:
            rig.servers[0].gate.clear()
            status, _, body = await rig.ask(text="hi")
            assert status == 502 and "nothing came for 0.05 s" in json.loads(body)["error"]["message"]
            assert rig.state(0) is State.UP

    asyncio.run(scenario())


def test_request_when_a_server_answers_503_then_another_is_asked():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            rig.servers[0].status = 503
            answers = [await rig.ask(text="hi") for _ in range(4)]
            assert [json.loads(body)["text"] for _, _, body in answers] == ["b"] * 4

    asyncio.run(scenario())


def test_request_when_all_servers_but_one_are_full_then_that_one_answers():
    async def scenario():
        servers = [FakeServer(name) for name in "abc"]
        async with running(servers, max_retries=0) as rig:
            for server, status in zip(servers, (503, 429), strict=False):
                server.status = status
            assert outcomes([await rig.ask(text="hi") for _ in range(3)]) == ["c"] * 3
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("names", ["a", "ab"])
def test_request_when_every_server_answers_503_then_each_is_asked_once_and_the_last_answer_is_passed_on(names):
    async def scenario():
        async with running([FakeServer(name) for name in names], max_retries=3) as rig:
            for server in rig.servers:
                server.status = 503
            status, headers, body = await rig.ask(text="hi")
            assert status == 503 and b"says 503" in body and int(headers["retry-after"]) >= 1
            assert rig.num_seen() == [1] * len(names)

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
