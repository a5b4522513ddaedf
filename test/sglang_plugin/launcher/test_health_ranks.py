# SPDX-License-Identifier: Apache-2.0
"""What a probe is told: that a rank stands still, else what SGLang says of its health."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Response
from sglang.srt.entrypoints import http_server

from banyan._native import RankTable
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import clients, health_ranks
from banyan.sglang_plugin.launcher.loads import rank_table_at


@pytest.fixture
def rank_table(monkeypatch):
    """Of a server that shares."""
    rank_table_at.cache_clear()
    table = RankTable.create(2)
    monkeypatch.setattr(health_ranks, "get_server_args", lambda: None)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "bookkeeping", lambda args: {"rank_table": table.path})
    yield table
    # Another table may come to lie at its path.
    rank_table_at.cache_clear()


@pytest.fixture
def said(monkeypatch):
    """SGLang's own answer, and how often it was asked."""
    sglang = SimpleNamespace(status=200, num_asked=0)

    async def health_generate(request):
        sglang.num_asked += 1
        return Response(status_code=sglang.status)

    monkeypatch.setattr(http_server, "health_generate", health_generate)
    return sglang


def ask():
    app = FastAPI()
    health_ranks.add_to(app)
    health_ranks.add_to(app)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get("/health_ranks")

    return asyncio.run(run())


@pytest.mark.parametrize("attribute", [runtime.BOOKKEEPING, runtime.IS_OFF])
def test_path_when_banyan_was_asked_for_then_it_is_there_though_banyan_is_off(attribute, monkeypatch):
    monkeypatch.setattr(runtime, "get_server_args", lambda: SimpleNamespace(**{attribute: True}))
    monkeypatch.setattr(http_server, "app", FastAPI())
    health_ranks.before_setup_http()
    assert health_ranks.HEALTH_RANKS_PATH in [route.path for route in http_server.app.routes]


@pytest.mark.parametrize("status", [200, 503])
def test_probe_when_all_ranks_report_then_it_is_told_what_sglang_says(rank_table, said, status):
    said.status = status
    assert ask().status_code == status and said.num_asked == 1


def test_probe_when_a_rank_stands_still_then_503_until_it_reports_and_sglang_is_not_asked(rank_table, said):
    rank_table.set_num_silent(1)
    answer = ask()
    assert (answer.status_code, said.num_asked) == (503, 0) and "do not report: 1" in answer.text
    rank_table.set_num_silent(0)
    assert ask().status_code == 200


def test_probe_when_the_server_shares_nothing_then_it_is_told_what_sglang_says(said, monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    assert ask().status_code == 200 and said.num_asked == 1


def test_probe_when_it_makes_sglang_ask_itself_then_that_is_no_client_s_request():
    scope = {"type": "http", "path": health_ranks.HEALTH_RANKS_PATH}
    assert clients.asks_for_health(SimpleNamespace(scope=scope))
