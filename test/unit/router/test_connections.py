# SPDX-License-Identifier: Apache-2.0
"""Connections that ask slowly, too much, or too many at once, and clients that do not read what they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import h11
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from test.unit.router.fake_pair import FakeDecode, FakePrefill, Rooms
from test.unit.router.fake_server import FakeServer, Served, raw, running, until
from uvicorn.protocols.http.h11_impl import H11Protocol

from banyan.router import connections, run
from banyan.router.answers import send_in_pieces
from banyan.router.bodies import SMALL_BYTES, Answers, Bodies, Refused
from banyan.router.connections import SLICE_BYTES, Bounded
from banyan.router.settings import Settings


def test_answer_when_its_client_does_not_take_it_then_no_other_large_one_is_sent_until_the_client_has_gone():
    async def scenario():
        a = FakeServer("a")
        async with running([a]) as rig:
            bodies = rig.router._bodies
            bodies.max_bytes = 24 << 20
            a.says["/generate"] = (200, "application/json", b"x" * (16 << 20))
            async with unread(rig, asking({"text": "hi"})):
                await until(lambda: bodies.num_answer_bytes)
                assert (await rig.ask(text="hi"))[0] == 503
                a.says["/generate"] = (200, "application/json", b"x" * SMALL_BYTES)
                assert (await rig.ask(text="hi"))[0] == 200, "who asks for little waits for nobody"
            await until(lambda: not bodies.num_answer_bytes)
            a.says["/generate"] = (200, "application/json", b"x" * (16 << 20))
            assert (await rig.ask(text="hi"))[::2] == (200, b"x" * (16 << 20))

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/generate", "/v1/responses/x", "/abort_request"])
def test_answers_when_there_is_no_room_for_more_then_they_are_read_no_further_and_refused(path):
    async def scenario():
        servers = [FakeServer("a"), FakeServer("b")]
        async with running(servers) as rig:
            bodies = rig.router._bodies
            bodies.max_bytes = 4 << 20
            for server in servers:
                server.says[path] = (200, "application/json", *[b"x" * SMALL_BYTES] * 5, asyncio.Event())
            method = "GET" if path == "/v1/responses/x" else "POST"
            async with rig.client.request(method, rig.served.url + path, json={"text": "hi"}) as response:
                assert response.status == 503 and b"--max-buffered-mib" in await response.read()
            await until(lambda: not bodies.num_answer_bytes)
            assert path != "/generate" or sum(rig.num_seen()) == 1, "no other server does it over again"
            for server in servers:
                server.says[path] = (200, "application/json", b"x" * SMALL_BYTES)
            async with rig.client.request(method, rig.served.url + path, json={"text": "hi"}) as response:
                assert response.status == 200
            # Of a response the first that has it answers, while the other may still do.
            await until(lambda: not any(server.in_flight for server in rig.router.all_servers))
            rig.assert_idle()
            assert not bodies.num_answer_bytes

    asyncio.run(scenario())


@pytest.mark.parametrize("first", [(), (b"data: 1\n\n",)], ids=["first", "later"])
def test_stream_when_an_event_of_megabytes_comes_and_there_is_no_room_for_it_then_it_is_read_no_further(first):
    async def scenario():
        a = FakeServer("a")
        async with running([a]) as rig:
            bodies = rig.router._bodies
            bodies.max_bytes = 4 << 20
            a.says["/generate"] = (200, "text/event-stream", *first, *[b"x" * SMALL_BYTES] * 6, asyncio.Event())
            status, _, body = await rig.ask(text="hi", stream=True)
            assert status == (200 if first else 503) and b"--max-buffered-mib" in body
            assert len(body) < 1000 and body.startswith(b"".join(first))
            await until(lambda: not bodies.num_answer_bytes)
            rig.assert_idle()

    asyncio.run(scenario())


def test_stream_when_its_first_event_was_passed_on_then_the_router_does_not_keep_it():
    async def scenario():
        a = FakeServer("a")
        async with running([a]) as rig:
            a.gate.clear()
            async with rig.client.post(f"{rig.served.url}/generate", json={"stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                (give_up,) = rig.router.all_servers[0].in_flight.values()
                await until(lambda: not give_up.__self__.first)
                a.gate.set()
                assert (await response.read()).endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


@pytest.mark.parametrize("side", [0, 1])
def test_answers_of_a_pair_when_there_is_no_room_for_one_of_them_then_refused(side):
    async def scenario():
        rooms = Rooms()
        servers = [FakePrefill("p", rooms), FakeDecode("d", rooms)]
        async with running(servers) as rig:
            bodies = rig.router._bodies
            bodies.max_bytes = 2 << 20

            async def generate(request):
                return await servers[side].anything(request)

            routes = servers[side].app.routes
            routes.insert(0, Route("/generate", generate, methods=["POST"]))
            servers[side].says["/generate"] = (200, "application/json", *[b"x" * SMALL_BYTES] * 3, asyncio.Event())
            assert (await rig.ask(text="hi"))[0] == 503
            await until(lambda: not any(server.in_flight for server in rig.router.all_servers))
            rig.assert_idle()
            assert not bodies.num_answer_bytes

    asyncio.run(scenario())


def test_answer_when_it_waits_for_what_was_sent_before_it_then_all_of_it_counts():
    async def scenario():
        bodies, has_read = Bodies(max_body_bytes=1, max_bytes=1, timeout_s=1.0), asyncio.Event()

        async def send(message):
            # As uvicorn's, with the answer before this one still unread.
            await has_read.wait()

        response, answers = Response(b"x" * 1000), Answers(bodies)
        sending = asyncio.create_task(send_in_pieces(answers, response, {"type": "http"}, None, send))
        await asyncio.sleep(0)
        assert bodies.num_answer_bytes == 1000
        has_read.set()
        await sending
        with pytest.raises(Refused):
            answers.come(5)
        assert bodies.num_answer_bytes == 0, "nobody waits for what another server says then"

    asyncio.run(scenario())


class _Few(Bounded):
    max_connections = 2
    header_s = 1.0


@contextlib.asynccontextmanager
async def bounded():
    """A server of one page whose connections are bounded; its port."""

    async def length(request):
        return JSONResponse(len(await request.body()))

    async def length_later(request):
        for _ in range(500):
            await asyncio.sleep(0)
        return JSONResponse(len((await request.receive())["body"]))

    here = Route("/", lambda request: JSONResponse("here"))
    lengths = [Route("/", length, methods=["POST"]), Route("/later", length_later, methods=["POST"])]
    served = Served(Starlette(routes=[here, *lengths]))
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
            # A byte that was sent as it was closed resets it.
            with contextlib.suppress(ConnectionResetError):
                assert await closed == b""

    asyncio.run(scenario())


def test_connection_when_its_header_is_large_then_400():
    async def scenario():
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = asyncio.create_task(reader.readline())
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\na: ")
            for _ in range(64):
                writer.write(b"x" * (16 << 10))
                await asyncio.sleep(0.005)
                if answer.done():
                    break
            assert (await answer).startswith(b"HTTP/1.1 400")

    asyncio.run(scenario())


def test_connections_when_httptools_is_installed_then_the_parser_that_bounds_headers_reads_them_all_the_same():
    says = (
        "import sys, types; sys.modules['httptools'] = types.ModuleType('httptools')\n"
        "from banyan.router.connections import Bounded\n"
        "from uvicorn.protocols.http.h11_impl import H11Protocol\n"
        "assert issubclass(Bounded, H11Protocol)"
    )
    subprocess.run([sys.executable, "-c", says], check=True)


def test_connection_when_it_asks_in_time_then_it_is_kept_for_the_next_request():
    async def scenario():
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(4):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b'"here"' in await reader.readuntil(b'"here"')
                await asyncio.sleep(0.3)

    asyncio.run(scenario())


@pytest.fixture
def handed(monkeypatch):
    """What h11 is handed, each time with the number of the turn in which it is."""
    pieces, receive = [], H11Protocol.data_received

    def told(connection, data):
        pieces.append((turns[0], data))
        receive(connection, data)

    monkeypatch.setattr(H11Protocol, "data_received", told)
    monkeypatch.setattr(connections, "TURN_S", 0.0)
    return pieces


turns = [0]
"""Of the loop."""


@contextlib.asynccontextmanager
async def counting():
    async def count():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counted = asyncio.create_task(count())
    yield
    counted.cancel()


POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


@pytest.mark.parametrize("framing", ["chunks", "length"])
def test_body_when_all_of_it_comes_at_once_then_it_arrives_and_chunks_leave_others_their_turns(framing, handed):
    body = b"x" * 30_000
    chunked = b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * len(body) + b"0\r\n\r\n"
    whole = b"content-length: %d\r\n\r\n" % len(body) + body

    async def scenario():
        async with bounded() as port, counting():
            answer = await raw(port, POST + (chunked if framing == "chunks" else whole))
            assert answer.endswith(b"30000")
        if framing == "chunks":
            assert max(len(piece) for _, piece in handed) <= SLICE_BYTES
            # The last slice of one read, and the first of the next.
            assert max(Counter(turn for turn, _ in handed).values()) <= 2

    asyncio.run(scenario())


@pytest.mark.parametrize("chunk", [b"", b"%x\r\n" % 1000 + b"x" * 1000 + b"\r\n"])
def test_body_when_nobody_takes_it_yet_then_no_more_of_it_is_read_than_is_kept_of_any(chunk):
    size = b"transfer-encoding: chunked" if chunk else b"content-length: 8000000"

    async def scenario():
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /later HTTP/1.1\r\nhost: x\r\n" + size + b"\r\n\r\n"
            writer.write(head + (chunk or b"x" * 1000) * 8000)
            await reader.readuntil(b"\r\n\r\n")
            assert 64 << 10 < int(await reader.read(20)) < 512 << 10

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lines", "most_bytes"), [(b"a:b\r\n" * 50_000, 2 << 10), (b"a: " + b"x" * 250_000 + b"\r\n", 17 << 10)]
)
def test_header_when_it_comes_at_once_and_is_large_or_has_many_lines_then_400_before_it_is_read(
    lines, most_bytes, handed
):
    async def scenario():
        async with bounded() as port:
            with contextlib.suppress(ConnectionError):
                assert (await raw(port, POST + lines + b"\r\n")).startswith(b"HTTP/1.1 400")
        assert sum(len(piece) for _, piece in handed) <= most_bytes

    asyncio.run(scenario())


def test_header_when_it_has_as_many_lines_as_any_client_sends_then_it_is_read():
    async def scenario():
        async with bounded() as port:
            assert (await raw(port, POST + b"a: b\r\n" * 200 + b"\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


def test_request_when_the_one_before_was_answered_before_its_body_came_then_it_is_answered_too():
    async def scenario():
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\nNot Found")).startswith(b"HTTP/1.1 404")
                writer.write(b"x" * 200_000)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b'"here"' in await reader.readuntil(b'"here"')

    asyncio.run(scenario())


def test_body_when_it_goes_on_wrongly_behind_an_early_answer_then_the_connection_is_closed_and_nothing_fails():
    async def scenario():
        failed = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
        async with bounded() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /none HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            assert (await reader.readuntil(b"\r\n\r\nNot Found")).startswith(b"HTTP/1.1 404")
            writer.write(b"no chunk\r\n")
            assert await reader.read() == b""
        assert not failed

    asyncio.run(scenario())


BEHIND = [b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"a:b\r\n" * 50_000]


@pytest.mark.parametrize("behind", BEHIND[:2], ids=["line", "request"])
def test_request_when_more_is_sent_behind_it_then_its_answer_is_the_connections_last(behind):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            for text in ("hi", "x" * 200_000):
                rig.servers[0].gate.clear()
                reader, writer = await asyncio.open_connection("127.0.0.1", rig.served.port)
                writer.write(asking({"text": text}) + behind)
                await until(lambda: rig.servers[0].num_running)
                rig.servers[0].gate.set()
                answer = await reader.read()
                assert answer.count(b"HTTP/1.1") == 1 and b'"text":"a"' in answer

    asyncio.run(scenario())


@pytest.mark.parametrize("behind", BEHIND, ids=["line", "request", "much"])
def test_client_when_it_goes_and_had_sent_more_behind_its_request_then_the_server_is_told(behind):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].gate.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", rig.served.port)
            writer.write(asking({"text": "hi"}) + behind)
            await until(lambda: rig.servers[0].num_running)
            writer.write(behind)
            await writer.drain()
            writer.close()
            await until(lambda: not rig.router.all_servers[0].in_flight)
            rig.assert_idle()

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

    def write(self, data):
        self.num_bytes += len(data)

    def is_closing(self):
        return "close" in self.told

    def close(self):
        self.told.append("close")

    def abort(self):
        self.told.append("abort")


def watched(num_bytes):
    """A connection, its transport, and what it wants to be called for later."""
    connection, later = Bounded.__new__(Bounded), []
    connection.transport, connection.cycle = _Unsent(num_bytes), None
    connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)

    def call_later(delay_s, *call):
        later.append((delay_s, *call))
        return SimpleNamespace(cancel=later.clear)

    connection.loop = SimpleNamespace(call_later=call_later)
    return connection, connection.transport, later


def test_client_when_it_reads_slowly_then_it_is_cut_off_once_it_takes_next_to_nothing():
    connection, transport, later = watched(300_000)
    connection.pause_writing()
    for transport.num_bytes in (200_000, 100_000, 90_000):
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


@pytest.mark.parametrize("begun", [(), (h11.Response(status_code=404, headers=[]),)], ids=["none", "early-answer"])
def test_client_when_it_asks_wrongly_and_does_not_read_then_it_is_not_waited_for_without_end(begun):
    connection, transport, later = watched(1000)
    connection.conn = h11.Connection(h11.SERVER)
    connection.conn.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    connection.conn.next_event()
    for event in begun:
        connection.conn.send(event)
    connection.send_400_response("no chunk")
    (_, look, *what) = later.pop()
    look(*what)
    assert transport.told == ["close", "abort"]


def test_client_when_it_stops_to_read_the_end_of_its_last_answer_then_it_is_still_watched():
    connection, transport, later = watched(300_000)
    connection.pause_writing()
    transport.close()
    connection.resume_writing()
    transport.num_bytes = 10_000
    for _ in range(2):
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
    assert config.ws == "none", "one that becomes a websocket is not bounded"


@pytest.mark.parametrize("limits", [(1024, 4096), (4096, 4096)])
def test_connections_when_requests_go_to_several_servers_then_there_are_descriptors_for_each(limits, monkeypatch):
    now = [limits]
    monkeypatch.setattr("resource.getrlimit", lambda what: now[-1])
    monkeypatch.setattr("resource.setrlimit", lambda what, wanted: now.append(wanted))
    monkeypatch.setattr(run.uvicorn.Server, "run", lambda self: now.append(self.config.http.max_connections))
    run.serve(Settings(prefills=("http://127.0.0.1:1",), decodes=("http://127.0.0.1:2", "http://127.0.0.1:3")))
    most = now.pop()
    assert now[-1] == (4096, 4096) and 3000 < 4 * most < 4096 - 128 - 3 * 40, "feeds of a server's ranks have their own"
