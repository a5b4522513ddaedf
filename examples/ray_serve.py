# SPDX-License-Identifier: Apache-2.0
"""SGLang servers as deployments of Ray Serve, and Banyan's router as what clients reach (docs/ray.md).

    serve run examples.ray_serve:app servers=2 gpus=2 arguments="--model-path M --dp 2"

Ray places the servers, watches them and starts them again. Each shares pages between its ranks. The router is that of
`banyan route`: it hears from each server which pages it has and how busy it is, and passes SGLang's paths on.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan.router.app import build
from banyan.router.settings import Settings

START_S = 1800.0
POLL_S = 0.5
STOP_S = 60.0
"""Then Ray kills a replica: what is to be done at its end has to be done before."""

HEALTH_S = 25.0
"""SGLang itself waits 20 s for a sign of life, and Ray 30 s for an answer."""

ASKED_S = 3.0
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
NODE = "node"
NUM_PORTS = 300
"""Of each server."""

MAX_REQUESTS = 4096
"""At a time. The router has a queue of its own, and refuses what is too much for it."""


@serve.deployment(num_replicas=1, max_ongoing_requests=MAX_REQUESTS, graceful_shutdown_timeout_s=STOP_S)
class Server:
    """One SGLang server with Banyan, for as long as its replica lives. The GPUs that Ray gives the replica are its."""

    def __init__(self, arguments: Sequence[str], host: str, port: int) -> None:
        host = ray.util.get_node_ip_address() if host == NODE else host
        self._url = f"http://{host}:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments, *_flags(host, port)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_replica,
        )
        deadline_s = time.monotonic() + START_S
        while not _is_up(self._url):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._stop()
                raise RuntimeError(f"the server ended with {self._process.returncode}: see the log of this replica")
            time.sleep(POLL_S)

    def url(self) -> str:
        return self._url

    async def check_health(self) -> None:
        """Asked by Ray; a replica that raises three times in a row is replaced."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended with {self._process.returncode}")
        if not await asyncio.to_thread(_is_up, self._url):
            raise RuntimeError("the server says nothing, or has a rank that stands still: see the log of this replica")

    def __del__(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S / 2)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@serve.deployment(num_replicas=1, max_ongoing_requests=MAX_REQUESTS)
@serve.ingress()
class Front:
    """What clients reach: `banyan route` in a replica. ``urls``: those that are known before their servers are up, by
    their numbers."""

    def __init__(self, servers: Sequence[DeploymentHandle], urls: Mapping[int, str], policy: str) -> None:
        self._servers = list(servers)
        self._policy = policy
        self._urls = dict(urls)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Asked by Ray, once, when the replica has been made."""
        while not self._urls:
            # Not all of them: one that is lost must not keep clients from the others.
            self._urls = await _urls_of(self._servers)
            await asyncio.sleep(POLL_S)
        app, _ = build(Settings(servers=tuple(self._urls.values()), policy=self._policy))

        async def from_anywhere(scope: Scope, receive: Receive, send: Send) -> None:
            # Ray's proxies are on every node, and may have others before them: who asks there is not of this machine,
            # and may not change servers.
            await app({**scope, "client": None}, receive, send)

        return from_anywhere

    async def check_health(self) -> None:
        """A server that came up later, or that Ray has started again on another node, has an address that the router
        does not know: this replica is replaced, too."""
        for number, url in (await _urls_of(self._servers)).items():
            if url != self._urls.get(number):
                raise RuntimeError(f"server-{number} is at {url}")


def app(args: dict[str, str]) -> serve.Application:
    """``servers``: how many. ``arguments``: of each, for SGLang. ``gpus``: of each. ``host``: where they listen, "node"
    for the address of the node in Ray's cluster. ``port``: of the first. ``policy``: as `banyan route --policy`."""
    arguments = shlex.split(args["arguments"])
    host, port = args.get("host", "127.0.0.1"), int(args.get("port", "30000"))
    kind = Server.options(ray_actor_options={"num_gpus": int(args.get("gpus", "1"))})
    ports = [port + NUM_PORTS * number for number in range(int(args.get("servers", "2")))]
    servers = [kind.options(name=f"server-{n}").bind(arguments, host, own) for n, own in enumerate(ports)]
    urls = {} if host == NODE else {n: f"http://{host}:{own}" for n, own in enumerate(ports)}
    return Front.bind(servers, urls, args.get("policy", "lmetric"))


async def _urls_of(servers: Sequence[DeploymentHandle]) -> dict[int, str]:
    """Of those that say it now, by their numbers. The others are being started."""
    asked = (asyncio.wait_for(server.url.remote(), ASKED_S) for server in servers)
    told = await asyncio.gather(*asked, return_exceptions=True)
    return {number: url for number, url in enumerate(told) if isinstance(url, str)}


def _flags(host: str, port: int) -> list[str]:
    """Of SGLang: the router hears of pages and loads at ports above those that SGLang has itself, one for each rank."""
    events, replay, loads = (port + above for above in (240, 260, 280))
    told = {"publisher": "zmq", "bind": True}
    told |= {"endpoint": f"tcp://{host}:{events}", "replay_endpoint": f"tcp://{host}:{replay}"}
    return [
        *("--host", host, "--port", str(port), "--enable-banyan", "--kv-events-config", json.dumps(told)),
        # SGLang takes no other address.
        *("--load-publish-endpoint", f"tcp://*:{loads}"),
    ]


def _end_with_replica() -> None:
    """Ray may end a replica without a word. A server that answered on would keep the port and the GPUs of the next."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_up(url: str) -> bool:
    try:
        status = _answer(f"{url}/health_ranks")
        if status == HTTPStatus.NOT_FOUND:
            # Banyan's feature that has it is off (docs/releases.md).
            status = _answer(f"{url}/health")
    except OSError:
        return False
    return status == HTTPStatus.OK


def _answer(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
