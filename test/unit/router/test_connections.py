# SPDX-License-Identifier: Apache-2.0
"""Connections that ask slowly, too much, or too many at once, and clients that do not read what they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from test.unit.router.fake_server import FakeServer, Served, raw, running, until

from banyan.router import run
from banyan.router.bodies import SMALL_BYTES
from banyan.router.connections import Bounded
from banyan.router.settings import Settings


def test_answer_when_its_client_does_not_take_it_then_no_other_large_one_is_sent_until_the_client_has_gone():
    async def scenario():
        a = FakeServer("a")
        async with running([a]) as rig:
            bodies = rig.router._bodies
            bodies._max_bytes = 24 << 20
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
