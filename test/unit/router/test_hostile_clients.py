# SPDX-License-Identifier: Apache-2.0
"""What clients can do to a router that they should not be able to: slow bodies, deep ones, other people's pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from test.unit.router.fake_server import FakeServer, Served, running, until

from banyan.router import dropped_lines, prompt, run
from banyan.router.bodies import Bodies, Refused
from banyan.router.connections import Bounded
from banyan.router.paths import BY_PATH, CHAT_COMPLETIONS, GENERATE
from banyan.router.settings import Settings
from banyan.router.upstream import Attempt, Lost
from banyan.router.verdict import TooLong, WholeEvents
from banyan.routing.headers import PLAN_HEADER, READ_HEADER, SOURCE_HEADER

DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000


async def raw(port, request):
    """What comes back on a connection that has sent ``request``, until the other end closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("body", [DEEP, b'{"text": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_body_when_it_is_too_deep_to_read_then_it_is_the_servers_to_refuse_and_the_connection_goes_on(body):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].status = 400
            for _ in range(2):
                async with rig.client.post(f"{rig.served.url}/v1/chat/completions", data=body) as response:
                    assert response.status == 400 and "says 400" in await response.text()
            assert rig.servers[0].seen[0][0] == body

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/router/nothing"), ("GET", "/router/drain"), ("GET", "/v1/loads"), ("POST", "/dumper/x")],
)
def test_request_when_neither_the_router_nor_a_server_behind_it_answers_it_then_404_in_the_form_that_clients_read(
    method, path
):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            async with rig.client.request(method, rig.served.url + path) as response:
                assert (response.status, response.content_type) == (404, "application/json")
                error = (await response.json())["error"]
            assert error["code"] == 404 and path in error["message"] and error["type"]
            assert rig.num_seen() == [0]

    asyncio.run(scenario())


def test_request_when_the_router_itself_fails_then_its_error_has_the_form_that_clients_read(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    async def scenario():
        async with running([FakeServer("a")]) as rig:
            monkeypatch.setattr(prompt, "read", fail)
            status, headers, body = await rig.ask(text="hi")
            assert (status, headers["content-type"]) == (500, "application/json")
            assert json.loads(body)["error"]["type"] == "internal_error"

    asyncio.run(scenario())


@pytest.mark.parametrize("character", ["\x01", "\x1b", "\x7f", "\u0085"])
@pytest.mark.parametrize("path", ["/model_info", "/v1/models", "/abort_request"])
def test_header_when_it_has_a_control_character_then_400_in_the_form_that_clients_read(character, path):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {character}x\r\n\r\n"
            answer = await raw(rig.served.port, head.encode())
            if character == "\u0085":
                assert answer.startswith(b"HTTP/1.1 200")
            else:
                assert answer.startswith(b"HTTP/1.1 400") and b"a header has a control character" in answer
                assert rig.num_seen() == [0]

    asyncio.run(scenario())


def test_body_when_it_does_not_come_then_408_and_the_connection_is_closed():
    async def scenario():
        async with running([FakeServer("a")], body_timeout_s=0.1) as rig:
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
            answer = await raw(rig.served.port, head + b'{"text"')
            assert answer.startswith(b"HTTP/1.1 408") and b"within 0.1 s" in answer
            assert rig.num_seen() == [0]
            assert b'banyan_router_refused_total{status="408"} 1.0' in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())


def test_bodies_when_there_is_no_room_for_more_then_the_next_is_refused_until_one_has_gone():
    async def parts(*given, then=None):
        for part in given:
            yield part
        if then is not None:
            await then.wait()

    async def scenario():
        bodies, rest = Bodies(max_body_bytes=100, max_bytes=150, timeout_s=5.0), asyncio.Event()

        async def read(stream):
            async with bodies.read(stream) as body:
                return body

        slow = asyncio.create_task(read(parts(b"x" * 90, then=rest)))
        await until(lambda: bodies.num_bytes == 90)
        with pytest.raises(Refused, match="--max-buffered-mib") as refused:
            await read(parts(b"x" * 80))
        assert refused.value.status == 503 and bodies.num_bytes == 90
        with pytest.raises(Refused, match="more than 100 bytes"):
            await read(parts(b"x" * 101))
        rest.set()
        assert await slow == b"x" * 90 and bodies.num_bytes == 0
        assert await read(parts(b"x" * 80)) == b"x" * 80

    asyncio.run(scenario())


class _Few(Bounded):
    max_connections = 2
    header_s = 1.0


@contextlib.asynccontextmanager
async def bounded():
    """A server of one page whose connections are bounded; its port."""
    served = Served(Starlette(routes=[Route("/", lambda request: JSONResponse("here"))]))
    served.config = uvicorn.Config(served.app, log_level="error", http=_Few, timeout_keep_alive=60)
    async with asyncio.timeout(20):
        await served.start()
        try:
            yield served.port
        finally:
            await served.stop()


def test_connection_when_its_request_drips_in_then_it_is_closed():
    async def scenario():
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            closed = asyncio.create_task(reader.read())
            writer.write(b"GET / HTTP/1.1\r\nhost: ")
            while not closed.done():
                writer.write(b"x")
                await asyncio.sleep(0.05)
            assert await closed == b""

    asyncio.run(scenario())


def test_connection_when_it_asks_in_time_then_it_is_kept_for_the_next_request():
    async def scenario():
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(4):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b'"here"' in await reader.readuntil(b'"here"')
                await asyncio.sleep(0.3)

    asyncio.run(scenario())


def test_requests_when_the_second_is_sent_with_the_first_then_it_may_take_longer_than_to_ask(monkeypatch):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].gate.clear()
            body = b'{"text": "hi"}'
            second = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.served.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + second)
            await until(lambda: rig.servers[0].num_running)
            await asyncio.sleep(2.0)
            rig.servers[0].gate.set()
            await reader.readuntil(b'"text":"a"')
            writer.close()

    monkeypatch.setattr(Bounded, "header_s", 1.0)
    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def unread(rig, request):
    """A connection whose client reads nothing of what it has asked for."""
    with socket.socket() as client:
        # Before it is connected: a kernel takes megabytes otherwise.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", rig.served.port))
        await loop.sock_sendall(client, request)
        yield client


def asking(fields):
    body = json.dumps(fields).encode()
    return b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_client_when_it_reads_nothing_of_its_stream_then_its_place_is_for_others():
    async def scenario():
        a = FakeServer("a")
        async with running([a], max_in_flight=1) as rig:
            rig.served.config.http.unread_s = 0.3
            a.says["/generate"] = (200, "text/event-stream", *[b"data: %b\n\n" % (b"x" * (1 << 20))] * 16)
            async with unread(rig, asking({"text": "hi", "stream": True})):
                await until(lambda: rig.router.all_servers[0].in_flight)
                del a.says["/generate"]
                assert (await rig.ask(text="hi"))[0] == 200
            rig.assert_idle()

    asyncio.run(scenario())


def test_client_when_it_reads_nothing_of_its_answer_then_nothing_of_it_is_kept():
    async def scenario():
        a = FakeServer("a")
        async with running([a]) as rig:
            rig.served.config.http.unread_s = 0.3
            a.says["/generate"] = (200, "application/json", b"x" * (16 << 20))
            async with unread(rig, asking({"text": "hi"})):
                connections = rig.served._server.server_state.connections
                await until(lambda: a.seen and connections)
                await until(lambda: not connections)

    asyncio.run(scenario())


class _Unsent:
    """A connection's transport that has so many bytes left to be sent."""

    def __init__(self, num_bytes):
        self.num_bytes, self.told = num_bytes, []

    def get_write_buffer_size(self):
        return self.num_bytes

    def close(self):
        self.told.append("close")

    def abort(self):
        self.told.append("abort")


def watched(num_bytes):
    """A connection, its transport, and what it wants to be called for later."""
    connection, later = Bounded.__new__(Bounded), []
    connection.transport, connection.cycle = _Unsent(num_bytes), None
    connection.flow = SimpleNamespace(pause_writing=lambda: None)
    connection.loop = SimpleNamespace(call_later=lambda delay_s, *call: later.append((delay_s, *call)))
    return connection, connection.transport, later


def test_client_when_it_reads_slowly_then_it_is_cut_off_once_it_has_stopped():
    connection, transport, later = watched(1000)
    connection.pause_writing()
    for transport.num_bytes in (900, 800, 800):
        assert not transport.told
        delay_s, look, *what = later.pop()
        assert delay_s == Bounded.unread_s and not later
        look(*what)
    assert transport.told == ["abort"] and not later


def test_client_when_it_does_not_read_the_end_of_its_last_answer_then_it_is_not_waited_for_without_end():
    connection, transport, later = watched(1000)
    connection._give_up(None)
    (_, look, *what) = later.pop()
    look(*what)
    assert transport.told == ["close", "abort"]


def test_connections_when_there_are_too_many_then_the_next_is_closed_and_the_others_go_on():
    async def scenario():
        async with bounded() as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            with contextlib.suppress(ConnectionError):
                assert await raw(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") == b""
            reader, writer = held[0]
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b'"here"' in await reader.readuntil(b'"here"')

    asyncio.run(scenario())


def test_router_when_it_is_served_then_its_connections_are_bounded_and_no_header_says_whom_one_comes_from(monkeypatch):
    served = []
    monkeypatch.setattr(run.uvicorn.Server, "run", lambda self: served.append(self.config))
    run.serve(Settings(servers=("http://127.0.0.1:1",), idle_timeout_s=7.0))
    (config,) = served
    assert issubclass(config.http, Bounded) and config.proxy_headers is False and config.http.unread_s == 7.0


@pytest.mark.parametrize("limits", [(1024, 4096), (4096, 4096)])
def test_connections_when_requests_go_to_several_servers_then_there_are_descriptors_for_each(limits, monkeypatch):
    now = [limits]
    monkeypatch.setattr("resource.getrlimit", lambda what: now[-1])
    monkeypatch.setattr("resource.setrlimit", lambda what, wanted: now.append(wanted))
    monkeypatch.setattr(run.uvicorn.Server, "run", lambda self: now.append(self.config.http.max_connections))
    run.serve(Settings(prefills=("http://127.0.0.1:1",), decodes=("http://127.0.0.1:2", "http://127.0.0.1:3")))
    most = now.pop()
    assert now[-1] == (4096, 4096) and 3000 < 4 * most < 4096


HOSTILE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"host": "evil.example"},
    {"x-forwarded-for": "10.0.0.9"},
    {"forwarded": "for=10.0.0.9"},
]


@pytest.mark.parametrize("headers", HOSTILE)
def test_servers_when_another_page_or_a_proxy_asks_for_them_then_it_is_refused(headers):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            url = f"{rig.served.url}/router/servers"
            async with rig.client.get(url, headers=headers) as response:
                assert response.status == 403 and (await response.json())["error"]["type"] == "forbidden"
            async with rig.client.get(url, headers={"origin": rig.served.url}) as response:
                assert response.status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("headers", HOSTILE)
@pytest.mark.parametrize("path", ["/router/drain", "/router/resume"])
def test_drain_when_another_page_or_a_proxy_asks_for_it_then_it_is_refused(headers, path):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            url = f"{rig.served.url}{path}?server={rig.servers[0].url}"
            async with rig.client.post(url, headers=headers) as response:
                assert response.status == 403 and (await response.json())["error"]["type"] == "forbidden"
            assert not rig.router.fleet.servers[0].is_draining
            own = {"origin": rig.served.url}
            async with rig.client.post(url.replace("resume", "drain"), headers=own) as response:
                assert response.status == 200

    asyncio.run(scenario())


def test_headers_when_a_client_says_what_only_a_router_says_then_they_are_dropped():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            said = {SOURCE_HEADER: "a:1", READ_HEADER: "a:1 0", "X-Banyan-Later": "1", PLAN_HEADER: "compute", "a": "b"}
            url = f"{rig.served.url}/generate"
            async with rig.client.post(url, json={"text": "hi"}, headers=said) as response:
                assert response.status == 200
            arrived = rig.servers[0].seen[0][1]
            assert {name for name in arrived if name.startswith("x-banyan-")} == {PLAN_HEADER} and arrived["a"] == "b"

    asyncio.run(scenario())


def test_event_when_it_never_ends_then_the_attempt_is_lost_and_nothing_is_kept():
    events = WholeEvents(max_bytes=1000)
    assert events.feed(b"data: 1\n\n" + b"x" * 900) == b"data: 1\n\n"
    with pytest.raises(TooLong):
        events.feed(b"x" * 200)

    async def scenario():
        class Answer:
            class content:
                @staticmethod
                async def readany():
                    return b"x" * 600

        attempt = Attempt(None, idle_timeout_s=1.0)
        attempt._response, attempt._events = Answer, WholeEvents(max_bytes=1000)
        with pytest.raises(Lost, match="more than 1000 bytes"):
            await attempt.read()

    asyncio.run(scenario())


def test_prompts_when_many_come_at_once_then_so_many_questions_are_asked_and_all_are_answered(monkeypatch):
    async def scenario():
        monkeypatch.setattr("banyan.router.tokens.MOST_ASKING", 2)
        server = FakeServer("a", events=True)
        async with running([server], tokenize_timeout_s=5.0) as rig:
            server.tokenises.clear()
            asked = [asyncio.create_task(rig.ask(text=f"hi {number}")) for number in range(6)]
            await until(lambda: len(server.seen) == 4)
            assert server.num_tokenising == 2
            server.tokenises.set()
            assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 6

    asyncio.run(scenario())


def test_prompt_when_it_would_only_be_refused_then_no_server_is_asked_for_its_tokens():
    async def scenario():
        server = FakeServer("a", events=True)
        async with running([server], max_in_flight=1, max_waiting=1) as rig:
            server.gate.clear()
            held = [asyncio.create_task(rig.ask(text="hi")) for _ in range(2)]
            await until(lambda: rig.router.forwarder.admission.num_waiting == 1)
            before = server.num_tokenised
            assert (await rig.ask(text="hi"))[0] == 429
            assert server.num_tokenised == before
            server.gate.set()
            await asyncio.gather(*held)

    asyncio.run(scenario())


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": [{"b": [{"c": {}}]}] * 20}}}
AGENTS = {
    "text": {"text": "[{" * 200_000},
    "escaped": {"text": '"[{\\' * 100_000},
    "turns": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 1000, "tools": [TOOL] * 100},
}


@pytest.mark.parametrize("body", AGENTS.values(), ids=AGENTS)
def test_body_when_its_text_or_its_turns_have_many_brackets_then_it_is_read(body):
    path = CHAT_COMPLETIONS if "messages" in body else GENERATE
    read = prompt.read(path, json.dumps(body).encode(), {})
    assert read.text is not None and len(read.text) > 50_000 and read.tokenize is not None


MUCH = {
    "lists": b'{"text": "hi", "more": [' + b"[[]]," * 100_000 + b"1]}",
    "behind strings": b'{"text": "hi", "\\"": "\\\\", "more": [' + b'["",{}],' * 70_000 + b"1]}",
    "strings": b'{"text": "hi", "more": [' + b'"",' * 600_000 + b"1]}",
}


@pytest.mark.parametrize("body", MUCH.values(), ids=MUCH)
def test_body_when_all_would_wait_while_it_is_read_then_it_is_passed_on_unread(body, monkeypatch):
    json.loads(body)
    monkeypatch.setattr(prompt, "json_of", lambda body: pytest.fail("it was read"))
    monkeypatch.setattr(dropped_lines, "decoded", lambda *args: pytest.fail("it was read"))
    assert not prompt.read(GENERATE, body, {}).is_read
    assert dropped_lines.DroppedLines(re.compile("hi")).without(BY_PATH[CHAT_COMPLETIONS], body) is body

    async def scenario():
        async with running([FakeServer("a")]) as rig:
            async with rig.client.post(f"{rig.served.url}/generate", data=body) as response:
                assert response.status == 200
            assert rig.servers[0].seen[0][0] == body

    asyncio.run(scenario())


def test_body_when_its_client_goes_before_its_turn_to_be_read_then_nothing_of_it_is_kept(monkeypatch):
    goes_on, read_of = threading.Event(), prompt.read

    def wait(*args):
        goes_on.wait()
        return read_of(*args)

    async def scenario():
        monkeypatch.setattr(prompt, "read", wait)
        async with running([FakeServer("a")]) as rig:
            router = rig.router
            try:
                for _ in range(3):
                    asked = asyncio.create_task(rig.ask(text="x" * (1 << 20)))
                    await until(lambda: router._bodies.num_bytes > 1 << 20)
                    await asyncio.sleep(0.05)
                    asked.cancel()
                    await until(lambda: router._bodies.num_bytes == 0)
                    # One is being read, which cannot be ended.
                    await until(lambda: not router._reader._work_queue.qsize())
            finally:
                goes_on.set()
            assert (await rig.ask(text="x" * (1 << 20)))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("events", [True, False])
def test_body_when_it_has_been_read_then_the_question_for_its_tokens_is_not_kept(events):
    async def scenario():
        async with running([FakeServer("a", events=events)], max_in_flight=1, max_waiting=1) as rig:
            kept = []
            forward = rig.router.forwarder.forward
            rig.router.forwarder.forward = lambda call, asked: kept.append(asked) or forward(call, asked)
            rig.servers[0].gate.clear()
            # The last is refused.
            going = [asyncio.create_task(rig.ask(text="hi"))]
            await until(lambda: rig.servers[0].num_running)
            going.append(asyncio.create_task(rig.ask(text="hi")))
            await until(lambda: rig.router.forwarder.admission.num_waiting)
            assert (await rig.ask(text="hi"))[0] == 429
            rig.servers[0].gate.set()
            await asyncio.gather(*going)
        assert [asked.request.tokenize for asked in kept] == [None] * 3
        assert [asked.request.text for asked in kept] == [b"hi"] * 3

    asyncio.run(scenario())


def test_body_when_it_is_large_then_it_is_read_beside_the_loop_and_when_it_is_larger_it_is_not(monkeypatch):
    body = json.dumps({"input_ids": [7] * 1000, "session_id": "s"}).encode()
    read = prompt.read(GENERATE, body, {})
    assert len(read.token_ids) == 1000 and read.session == "s"
    monkeypatch.setattr(prompt, "MOST_READ_BYTES", 1000)
    unread = prompt.read(GENERATE, body, {prompt.ROUTING_KEY_HEADER: "r"})
    assert unread.token_ids is None and unread.session == "r" and not unread.may_pin

    readers, read_of = [], prompt.read

    def told(*args):
        readers.append(threading.current_thread())
        return read_of(*args)

    async def scenario():
        monkeypatch.setattr(prompt, "read", told)
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            for fields in ({"input_ids": [7] * 200_000}, {"text": "[" * 10_000}, {"input_ids": [7] * 10}):
                assert (await rig.ask(**fields))[0] == 200
        *beside, on = readers
        assert all(thread.name.startswith("banyan-read-prompt") for thread in beside)
        assert on is threading.current_thread()

    asyncio.run(scenario())
