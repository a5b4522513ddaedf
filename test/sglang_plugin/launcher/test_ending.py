# SPDX-License-Identifier: Apache-2.0
"""A server that was told to end refuses what is new, and says how it is."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server

from banyan.sglang_plugin.launcher import ending


@pytest.fixture
def manager(monkeypatch):
    manager = SimpleNamespace(gracefully_exit=False)
    monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    return manager


def ask(method, path):
    app = FastAPI()
    app.add_api_route("/{path}", lambda: "well", methods=["GET", "POST"])
    ending.add_to(app)
    ending.add_to(app)
    assert len(app.user_middleware) == 1

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path)

    return asyncio.run(run())


def test_request_when_the_server_runs_then_it_is_served(manager):
    assert ask("POST", "/generate").text == '"well"'


def test_request_when_the_server_ends_then_503_at_once_so_that_a_router_asks_another(manager):
    manager.gracefully_exit = True
    answer = ask("POST", "/generate")
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_ends"


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/metrics"), ("POST", "/abort_request")])
def test_what_asks_nothing_of_ranks_when_the_server_ends_then_it_is_served(method, path, manager):
    manager.gracefully_exit = True
    assert ask(method, path).status_code == 200
