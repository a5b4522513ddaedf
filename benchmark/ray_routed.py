# SPDX-License-Identifier: Apache-2.0
"""Running servers behind Ray Serve's own routers, to compare Banyan's with: one replica for each server, which passes
on what it is given. An application for `serve run`; `benchmark.ray_serve` starts it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

MAX_REQUESTS = 4096
ROUTERS = {
    "pow2": RequestRouterConfig(),
    "prefix": RequestRouterConfig(
        request_router_class=(
            "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
        )
    ),
}
"""Ray's default, power of two choices; and the one of Ray Serve LLM that compares prompts with those that it sent."""


@dataclass(frozen=True)
class Asked:
    """A request, and its prompt as text by which Ray's router places it."""

    body: bytes
    prompt: str


@serve.deployment(max_ongoing_requests=MAX_REQUESTS)
class Passing:
    """In front of the server that has the replica's number."""

    def __init__(self, servers: list[str]) -> None:
        self._url = servers[serve.get_replica_context().rank.rank]

    async def answer(self, asked: Asked) -> AsyncIterator[bytes]:
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{self._url}/generate", data=asked.body, headers=headers) as response:
                response.raise_for_status()
                async for piece in response.content.iter_any():
                    yield piece


@serve.deployment(max_ongoing_requests=MAX_REQUESTS)
@serve.ingress()
class Front:
    def __init__(self, passing: DeploymentHandle) -> None:
        self._passing = passing.options(stream=True)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    async def generate(self, request: Request) -> StreamingResponse:
        body = await request.body()
        prompt = " ".join(map(str, json.loads(body)["input_ids"]))
        return StreamingResponse(self._passing.answer.remote(Asked(body, prompt)), media_type="text/event-stream")


def app(args: dict[str, str]) -> serve.Application:
    """``servers``: their URLs, separated by commas. ``router``: a name of ``ROUTERS``."""
    servers = args["servers"].split(",")
    passing = Passing.options(num_replicas=len(servers), request_router_config=ROUTERS[args["router"]])
    return Front.bind(passing.bind(servers))
