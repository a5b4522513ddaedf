# SPDX-License-Identifier: Apache-2.0
"""A request that is only asked about: its tokens are told, and no rank hears of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Request
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from banyan.config import Config
from banyan.routing.headers import TENANT_HEADER
from banyan.routing.question import PATH_FIELD, question
from banyan.routing.tenant_secret import TenantSecret
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import prompt_tokens, rerun, tenant_salts


class Tokenizer:
    def encode(self, text):
        return list(text.encode())


MANAGER = SimpleNamespace(tokenizer=Tokenizer())


class Served:
    """SGLang's routes, as far as a question meets them."""

    def __init__(self):
        self.app = FastAPI()
        self.generated, self.asked, self.bodies = [], [], []
        self.app.post("/tokenize")(self.tokenize)
        for path in ("/v1/messages", "/v1/responses"):
            self.app.post(path)(self.messages)

    async def tokenize(self, request: TokenizeRequest, raw_request: Request):
        return await prompt_tokens.around_handle_tokenize(self._plain, None, request, request, raw_request)

    async def messages(self, body: dict, raw_request: Request):
        self.bodies.append(body)
        if "refused" in body:
            return {"refused": True}
        obj = GenerateReqInput(**body["as"])
        return [answer async for answer in rerun.around_generate_request(self._generate, MANAGER, obj, raw_request)]

    async def _plain(self, serving, adapted, request, raw_request):
        self.asked.append(request.prompt)
        return {"tokens": [1]}

    async def _generate(self, manager, obj, request):
        self.generated.append(obj)
        yield "answer"


@pytest.fixture(autouse=True)
def banyan_is_on(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())


def ask(served, body, headers=None):
    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://server") as client:
            return (await client.post("/tokenize", json=body, headers=headers)).json()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"input_ids": [5, 6]}, [5, 6]),
        ({"input_ids": [[5], [6]]}, [5]),
        ({"text": "ab"}, [97, 98]),
        ({"text": ["ab"]}, []),
        ({"input_ids": [5], "image_data": "x"}, []),
        ({"input_ids": [5], "lora_path": "adapter"}, []),
    ],
)
def test_question_when_a_server_would_generate_then_the_tokens_are_told_and_nothing_is_generated(fields, tokens):
    served = Served()
    answer = ask(served, question("/v1/messages", {"as": fields, "stream": True}))
    assert (answer["tokens"], answer["count"], answer[PATH_FIELD]) == (tokens, len(tokens), "/v1/messages")
    assert served.generated == [] and served.asked == []
    assert [(body["stream"], body["store"], body["background"]) for body in served.bodies] == [(False, False, False)]


@pytest.mark.parametrize("fields", [{"refused": True}, {}])
def test_question_when_the_server_would_refuse_then_no_tokens_are_told(fields):
    assert ask(Served(), question("/v1/messages", fields))["tokens"] == []


FOLLOWING = question("/v1/responses", {"as": {"input_ids": [5, 6]}, "previous_response_id": "resp_of_anybody"})


@pytest.fixture
def with_tenants(monkeypatch, tmp_path):
    """What routers say to a server with tenants."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    monkeypatch.setattr(runtime, "config", lambda: Config(tenant_secret_file=str(secret)))
    tenant_salts._tenant_secret.cache_clear()
    return TenantSecret(secret.read_bytes())


def test_question_when_it_goes_on_from_a_response_then_a_tenant_is_told_nothing_of_it(with_tenants):
    served = Served()
    of_a_tenant = with_tenants.word(with_tenants.salt_of("tenant", "acme"))
    for headers in (None, {TENANT_HEADER: of_a_tenant}, {TENANT_HEADER: with_tenants.routers_word[:-1] + "x"}):
        assert ask(served, FOLLOWING, headers)["tokens"] == []
    assert served.bodies == []


def test_question_when_a_router_goes_on_from_a_response_then_the_tokens_are_told(with_tenants):
    assert ask(Served(), FOLLOWING, {TENANT_HEADER: with_tenants.routers_word})["tokens"] == [5, 6]


def test_question_when_there_are_no_tenants_then_what_follows_a_response_is_told():
    assert ask(Served(), FOLLOWING)["tokens"] == [5, 6]


@pytest.mark.parametrize("path", ["/tokenize", "/flush_cache", 5, None])
def test_question_when_it_is_about_another_path_then_it_is_none(path):
    served = Served()
    assert ask(served, question(path, {})) == {"tokens": [1]} and served.asked == [""]


def test_question_when_banyan_is_off_then_it_is_none(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert ask(Served(), question("/v1/messages", {"as": {"input_ids": [5]}})) == {"tokens": [1]}


def test_request_when_it_is_no_question_then_it_is_served(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    monkeypatch.setattr(rerun.clients, "admit", lambda obj, request, manager: None)
    served = Served()

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://server") as client:
            return (await client.post("/v1/messages", json={"as": {"input_ids": [5]}})).json()

    assert asyncio.run(scenario()) == ["answer"] and len(served.generated) == 1
