# SPDX-License-Identifier: Apache-2.0
"""Servers that answer as SGLang's do, and a router in front of them, on real sockets in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from datetime import UTC, datetime

import aiohttp
import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from banyan.router.app import build
from banyan.router.connections import bounded
from banyan.router.events import EventBatch
from banyan.router.settings import Settings
from banyan.routing.question import PATH_FIELD, asked_about

BLOCK_TOKENS = 4
BOOTSTRAP_PORT = 8998
TEST_TIMEOUT_S = 20.0
POISON = b"poison"
"""A server whose engine sees it ends, at once."""


class _Quiet(uvicorn.Server):
    """uvicorn that leaves the process' signals alone."""

    def capture_signals(self):
        return contextlib.nullcontext()


class Served:
    """An application on a port of its own."""

    def __init__(self, app, http="auto"):
        self.app = app
        self._listen(port=0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1, http=http)

    def _listen(self, port):
        # Of the protocol that asyncio knows: of others it lets small packets wait, 40 ms for each answer.
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))

    async def start(self):
        self._server = _Quiet(self.config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self):
        self._server.should_exit = True
        await self._task

    async def kill(self):
        """As SIGKILL: nobody listens any more, and every connection is reset."""
        for listening in self._server.servers:
            listening.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.force_exit = True
        await self.stop()
        self._socket.close()

    async def come_back(self):
        self._listen(self.port)
        await self.start()


class FakeServer(Served):
    """One SGLang server. Its tokens are bytes; its answers are numbered events."""

    def __init__(self, name, *, num_ranks=1, events=False, loads=False, banyan=False, mode="null"):
        self.name, self.num_ranks, self.banyan, self.mode = name, num_ranks, banyan, mode
        self.seen = []
        self.is_dead = self.is_ending = False
        self.num_looks = 0
        self.dies = asyncio.Event()
        self.dies.set()
        self.status = 200
        self.num_tokens = 3
        self.gate = asyncio.Event()
        self.gate.set()
        self.awake = asyncio.Event()
        self.awake.set()
        self.num_left = 0
        self.num_running = 0
        self.loads_status = 200
        self.publishers = [Publisher() for _ in range(num_ranks)] if events or loads else []
        self.publishes_load = loads
        self.tokenises = asyncio.Event()
        self.tokenises.set()
        self.num_tokenising = self.num_tokenised = 0
        self.asked_with = {}
        self.banyan_state = {}
        self.more_info = {}
        self.reads = {}
        self.says = {}
        self.answers_with = {}
        self.more_headers = {}
        paths = ("/generate", "/v1/completions", "/v1/chat/completions")
        super().__init__(
            Starlette(
                routes=[
                    *(Route(path, self.generate, methods=["POST", "PUT"]) for path in paths),
                    Route("/health", self.or_with(self.health)),
                    Route("/server_info", self.server_info),
                    Route("/v1/loads", self.or_with(self.loads)),
                    Route("/v1/models", self.or_with(self.models)),
                    Route("/tokenize", self.or_with(self.tokenize), methods=["POST"]),
                    Route("/{path:path}", self.anything, methods=["GET", "HEAD", "POST", "PUT", "OPTIONS"]),
                ]
            )
        )

    def or_with(self, answer):
        """``answers_with`` has bodies by path, in place of what it answers by itself."""

        async def answered(request):
            body = self.answers_with.get(request.url.path)
            return await answer(request) if body is None else Response(body, media_type="application/json")

        return answered

    async def generate(self, request):
        if request.url.path in self.says:
            return await self.anything(request)
        body = await request.body()
        self.seen.append((body, dict(request.headers)))
        self.num_running += 1
        if POISON in body:
            await self.dies.wait()
            self.is_dead = True
            self._death = asyncio.create_task(self.kill())
            await asyncio.Event().wait()
        try:
            await self.awake.wait()
            if self.status != 200:
                return JSONResponse({"error": {"message": f"{self.name} says {self.status}"}}, self.status)
            if json.loads(body).get("stream"):
                return StreamingResponse(self.pieces(), media_type="text/event-stream")
            await self.gate.wait()
            return JSONResponse({"text": self.name, "path": request.url.path})
        finally:
            self.num_running -= 1

    async def anything(self, request):
        """``says`` has a status, a type and pieces by path; an exception in place of one breaks the connection, and an
        event is waited for."""
        self.seen.append((await request.body(), dict(request.headers)))
        if request.url.path not in self.says:
            query = request.url.query
            raw = request.scope["raw_path"].decode() + (f"?{query}" if query else "")
            return JSONResponse({"by": self.name, "raw": raw})
        status, kind, *pieces = self.says[request.url.path]

        async def spoken():
            for piece in pieces:
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, asyncio.Event):
                    await piece.wait()
                    continue
                yield piece
                await asyncio.sleep(0.005)

        said = {"x-said-by": self.name, "x-asked-by": request.method, "set-cookie": f"said-by={self.name}"}
        said |= self.more_headers
        return StreamingResponse(spoken(), status, said, kind)

    async def pieces(self):
        self.num_running += 1
        try:
            for number in range(self.num_tokens):
                if number:
                    await self.gate.wait()
                    await asyncio.sleep(0.005)
                yield f"data: {json.dumps({'text': self.name, 'number': number})}\n\n".encode()
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        finally:
            self.num_running -= 1

    async def health(self, request):
        await self.awake.wait()
        self.num_looks += 1
        return Response(status_code=503 if self.is_ending else 200)

    async def server_info(self, request):
        await self.awake.wait()
        info = {"dp_size": self.num_ranks, "startup_time": {"total": id(self)}, "kv_events": None}
        info |= {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": BOOTSTRAP_PORT}
        info["internal_states"] = [
            {"banyan": {"dp_rank": rank, **self.banyan_state}} if self.banyan else {} for rank in range(self.num_ranks)
        ]
        if self.publishers:
            info["kv_events"] = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": self.publishers[0].port,
                "replay_endpoint_port_base": self.publishers[0].replay_port,
                "topic": "",
                "block_size": BLOCK_TOKENS,
                "dp_size": self.num_ranks,
            }
        if self.publishes_load:
            info["kv_events"] |= {"load_endpoint_port_base": self.publishers[0].load_port, "load_topic": "load"}
        return JSONResponse(info | self.more_info)

    async def loads(self, request):
        await self.awake.wait()
        core = {"num_waiting_reqs": 0, "num_waiting_uncached_tokens": 0, "num_used_tokens": 0, "num_total_tokens": 0}
        loads = [
            {
                "dp_rank": rank,
                "timestamp": datetime.now(UTC).timestamp(),
                "num_running_reqs": 0,
                "max_total_num_tokens": 4096,
                **core,
                **self.reads,
            }
            for rank in range(self.num_ranks)
        ]
        return JSONResponse({"timestamp": datetime.now(UTC).isoformat(), "loads": loads}, self.loads_status)

    async def models(self, request):
        return JSONResponse({"data": [{"id": "shared"}, {"id": f"only-{self.name}"}]})

    async def tokenize(self, request):
        fields = json.loads(await request.body())
        self.asked_with = dict(request.headers)
        self.num_tokenising += 1
        self.num_tokenised += 1
        await self.tokenises.wait()
        self.num_tokenising -= 1
        asked = asked_about(fields) if self.banyan else None
        if asked is not None:
            path, of = asked
            words = [of["input"]] if path == "/v1/responses" else [message["content"] for message in of["messages"]]
            return JSONResponse({"tokens": list("".join(words).encode()), PATH_FIELD: path})
        text = fields["prompt"] if "prompt" in fields else "".join(message["content"] for message in fields["messages"])
        return JSONResponse({"tokens": list(text.encode())})


class Publisher:
    """A rank's KV events, with replay, as SGLang's ZmqEventPublisher sends them."""

    def __init__(self):
        self.context = zmq.asyncio.Context()
        self._pub = self.context.socket(zmq.PUB)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._router = self.context.socket(zmq.ROUTER)
        # It drops only what a test has it drop.
        self._router.set(zmq.SNDHWM, 0)
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._loads = self.context.socket(zmq.PUB)
        self.load_port = self._loads.bind_to_random_port("tcp://127.0.0.1")
        self.sent = []
        self.num_unheard = 0
        self._task = asyncio.create_task(self._replay())

    async def send(self, *events, lose=False):
        """Publish one batch; ``lose`` keeps it from the wire, not from the replay."""
        seq = len(self.sent)
        payload = msgspec.msgpack.encode(EventBatch(time.time(), list(events), 0))
        self.sent.append(payload)
        if not lose:
            await self._pub.send_multipart((b"", seq.to_bytes(8, "big"), payload))

    async def tell_load(self, payload):
        """Publish what was made of a load, or anything else."""
        await self._loads.send_multipart((b"load", (0).to_bytes(8, "big"), payload))

    async def _replay(self):
        while True:
            client, _, start = await self._router.recv_multipart()
            if self.num_unheard:
                self.num_unheard -= 1
                continue
            for seq in range(int.from_bytes(start, "big"), len(self.sent)):
                await self._router.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), self.sent[seq]))
            await self._router.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.context.destroy(linger=0)


class Rig:
    """A router, its servers and a client."""

    def __init__(self, servers, served, router, client):
        self.servers, self.served, self.router, self.client = servers, served, router, client

    async def ask(self, path="/generate", **fields):
        """Status, headers and body of one answer."""
        async with self.client.post(self.served.url + path, json=fields) as response:
            return response.status, response.headers, await response.read()

    async def get(self, path):
        async with self.client.get(self.served.url + path) as response:
            return response.status, await response.read()

    async def post(self, path):
        async with self.client.post(self.served.url + path) as response:
            return response.status, await response.read()

    def drop_connections(self, server):
        """Break the connections of a server that goes on."""
        for connection in list(server._server.server_state.connections):
            connection.transport.abort()

    def spoil_answers(self, server):
        """Go on with what is no chunk on the connections of a server."""
        for connection in list(server._server.server_state.connections):
            connection.transport.write(b"ZZ\r\n")

    def num_seen(self):
        return [len(server.seen) for server in self.servers]

    def state(self, number):
        return self.router.fleet.servers[number].health.state

    def assert_idle(self):
        """Every place has been given back."""
        for target in (target for fleet in self.router.fleets for target in fleet.targets):
            assert target.num_in_flight == 0
        assert not any(server.num_given_tokens for server in self.router.all_servers)
        assert not any(server.in_flight for server in self.router.all_servers)
        assert self.router.forwarder.admission.num_waiting == 0


async def raw(port, request):
    """What comes back on a connection that has sent ``request``, until the other end closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


async def until(condition):
    """Wait for something that must happen; the test's own timeout says when it does not."""
    while not condition():
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(servers, *, is_up=True, instead=None, **settings):
    """A router in front of ``servers``, all of which are up unless told otherwise. ``instead``: what it is told of them
    in place of the truth."""
    defaults = {"policy": "round_robin", "probe_interval_s": 0.02, "probe_timeout_s": 0.2, "health_interval_s": 60.0}
    async with asyncio.timeout(TEST_TIMEOUT_S):
        for server in servers:
            await server.start()
        sides = {"servers": "null", "prefills": "prefill", "decodes": "decode"}
        urls = {side: tuple(server.url for server in servers if server.mode == mode) for side, mode in sides.items()}
        app, router = build(asked := Settings(**(urls | (instead or {}) | defaults | settings)))
        served = Served(app, http=bounded(len(asked.urls), asked.idle_timeout_s))
        await served.start()
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
                rig = Rig(servers, served, router, client)
                if is_up:
                    await until(lambda: all(server.takes_requests for server in router.all_servers))
                yield rig
        finally:
            for server in servers:
                server.awake.set()
                server.gate.set()
            await asyncio.gather(*(each.stop() for each in (served, *servers)))
            for server in servers:
                for publisher in server.publishers:
                    await publisher.close()
