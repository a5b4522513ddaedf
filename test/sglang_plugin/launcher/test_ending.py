# SPDX-License-Identifier: Apache-2.0
"""A server that was told to end refuses what is new, and says how it is."""

import asyncio
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import OpenSessionReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock
from starlette.testclient import TestClient, WebSocketDenialResponse

from banyan import faults
from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import ending
from banyan.sglang_plugin.launcher.all_ranks import around_awaited, around_communicator_call


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())


@pytest.fixture
def manager(monkeypatch):
    manager = SimpleNamespace(gracefully_exit=False)
    monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    return manager


def ask(method, path, root_path=""):
    app = FastAPI()
    app.add_api_route("/{path:path}", lambda: "well", methods=["GET", "POST"])
    ending.add_to(app)
    ending.add_to(app)
    assert len(app.user_middleware) == 1

    async def run():
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, root_path + path)

    return asyncio.run(run())


def test_server_when_it_is_about_to_serve_then_the_refusal_stands_before_sglangs_application(monkeypatch):
    monkeypatch.setattr(http_server, "app", FastAPI())
    ending.before_setup_http()
    assert [one.cls for one in http_server.app.user_middleware] == [ending.EndRefusal]


def test_request_when_the_server_runs_then_it_is_served(manager):
    assert ask("POST", "/generate").text == '"well"'


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/generate"), ("GET", "/server_info"), ("GET", "/get_server_info"), ("GET", "/flush_cache")],
)
def test_request_when_the_server_ends_then_503_at_once_so_that_a_router_asks_another(method, path, manager):
    manager.gracefully_exit = True
    answer = ask(method, path)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_ends"


def test_socket_when_the_server_ends_then_it_is_refused(manager):
    manager.gracefully_exit = True
    app = FastAPI()
    app.add_api_websocket_route("/v1/realtime", lambda socket: socket.accept())
    ending.add_to(app)
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        TestClient(app).websocket_connect("/v1/realtime"),
    ):
        pass
    assert refused.value.status_code == 503


@pytest.mark.parametrize("root_path", ["", "/behind"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("GET", path) for path in ("/", "/health", "/ping", "/metrics", "/v1/loads", "/v1/models/a/b")],
        *[("POST", path) for path in ("/abort_request", "/continue_generation", "/v1/responses/resp_1/cancel")],
    ],
)
def test_what_asks_nothing_of_ranks_when_the_server_ends_then_it_is_served(method, path, root_path, manager):
    manager.gracefully_exit = True
    assert ask(method, path, root_path).status_code == 200


def test_command_when_the_ranks_have_ended_then_who_asked_waits_no_longer():
    hooks, stopped = [], []
    set_hook = partial(ending.around_set_server_stop_hook, lambda manager, hook: hooks.append(hook))
    set_hook("manager", lambda: stopped.append(1))
    communicator = FanOutCommunicator(lambda obj: None, fan_out=1)

    call = faults.around(around_communicator_call, "test")

    async def run():
        waiting = [
            asyncio.ensure_future(call(FanOutCommunicator.__call__, communicator, obj)) for obj in ("first", "second")
        ]
        await asyncio.sleep(0.01)
        hooks[0]()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert [error.status_code for error in asyncio.run(run())] == [503, 503] and stopped == [1]


def test_update_or_session_when_the_ranks_have_ended_then_who_asked_waits_no_longer():
    """One of the updates waits for its turn, and would ask ranks that are gone."""
    hooks, sent = [], []
    ending.around_set_server_stop_hook(lambda manager, hook: hooks.append(hook), "manager", lambda: None)
    call = faults.around(around_awaited, "test")

    async def run():
        manager = SimpleNamespace(
            auto_create_handle_loop=lambda: None,
            is_pause_cond=asyncio.Condition(),
            is_pause=False,
            model_update_lock=RWLock(),
            elastic_worker_count=1,
            session_futures={},
            _dispatch_to_scheduler=sent.append,
        )
        manager._wait_for_model_update_from_disk = partial(TokenizerManager._wait_for_model_update_from_disk, manager)
        update = UpdateWeightFromDiskReqInput(model_path="a-model", load_format="auto")
        asked = [(TokenizerManager.update_weights_from_disk, update)] * 2
        asked.append((TokenizerManager.open_session, OpenSessionReqInput(capacity_of_str_len=1)))
        waiting = [asyncio.ensure_future(call(method, manager, obj)) for method, obj in asked]
        await asyncio.sleep(0.01)
        assert len(sent) == 2
        hooks[0]()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert [error.status_code for error in asyncio.run(run())] == [503] * 3 and len(sent) == 2
