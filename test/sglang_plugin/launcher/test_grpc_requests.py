# SPDX-License-Identifier: Apache-2.0
"""SGLang's gRPC servicer, with Banyan's hooks and without ranks: each request has an id of its own, and so many samples
as a request over HTTP may have."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from smg_grpc_servicer.sglang.request_manager import GrpcRequestManager

from banyan import faults
from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.abort_ids import is_meant
from banyan.sglang_plugin.launcher import clients, grpc_requests

around_request = faults.around(grpc_requests.around_request, "test")


def as_sglang_has(method):
    """In a whole run another test has had Banyan's hooks put there, and ids would be made of ids."""
    return inspect.unwrap(method)


class Servicer(GrpcRequestManager):
    def __init__(self):
        self.rid_to_state = {}
        self.sent = []
        self.enable_trace = False
        self.crash_dump_request_list = []
        self.disaggregation_mode = DisaggregationMode.NULL

    async def _send_to_scheduler(self, obj):
        self.sent.append(obj.rid)

    def generate_request(self, *args, **named):
        return around_request(as_sglang_has(GrpcRequestManager.generate_request), self, *args, **named)

    def embedding_request(self, *args, **named):
        return around_request(as_sglang_has(GrpcRequestManager.embedding_request), self, *args, **named)


@pytest.fixture(autouse=True)
def _sharing_alone(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "null")


def asked(num_samples=1):
    return SimpleNamespace(sampling_params=SimpleNamespace(n=num_samples, max_new_tokens=8), stream=True, rid="")


async def generate(servicer, request_id, num_samples=1):
    outputs = servicer.generate_request(obj=asked(num_samples), request_id=request_id, grpc_context=None)
    return [output async for output in outputs]


async def embed(servicer, request_id, num_samples=1):
    return [await (await servicer.embedding_request(obj=asked(num_samples), request_id=request_id))]


async def answered(servicer, *requests):
    """What becomes of requests that are under way at once; each that is known is answered with its id."""
    waiting = asyncio.gather(*requests, return_exceptions=True)
    async with asyncio.timeout(5):
        while not waiting.done():
            await asyncio.sleep(0.01)
            # Samples come behind their prompt.
            for rid, state in servicer.rid_to_state.items():
                if state.out_queue.empty():
                    state.out_queue.put_nowait({"said to": rid, "finished": True})
                    state.event.set()
    return waiting.result()


@pytest.mark.parametrize("ask", [generate, embed])
@pytest.mark.parametrize("named", ["", "a", None])
def test_requests_when_two_at_once_have_one_id_then_each_gets_its_own_answer(ask, named):
    servicer = Servicer()
    answers = asyncio.run(answered(servicer, ask(servicer, named), ask(servicer, named)))
    assert [answer["said to"] for (answer,) in answers] == servicer.sent and len(set(servicer.sent)) == 2
    assert all(is_meant(rid, named or "") for rid in servicer.sent)
    assert servicer.rid_to_state == {}


def test_samples_when_two_requests_have_one_id_then_none_has_those_of_the_other():
    servicer = Servicer()
    asyncio.run(answered(servicer, generate(servicer, "a", 2), generate(servicer, "a", 2)))
    assert len(set(servicer.sent)) == len(servicer.sent) >= 2
    assert all(is_meant(rid, "a") for rid in servicer.sent)


def test_id_when_it_comes_again_then_what_the_servicer_forgets_late_is_not_its_own():
    servicer = Servicer()
    for _ in range(2):
        asyncio.run(answered(servicer, generate(servicer, "a")))
    assert len(set(servicer.sent)) == 2


@pytest.mark.parametrize("ask", [generate, embed])
@pytest.mark.parametrize(
    ("mode", "num_samples"), [("null", clients.MOST_SAMPLES + 1), ("null", 2**32 - 1), ("prefill", 2)]
)
def test_request_when_it_wants_too_many_samples_then_it_is_refused_before_any_is_made(
    monkeypatch, ask, mode, num_samples
):
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: mode)
    servicer = Servicer()
    (refused,) = asyncio.run(answered(servicer, ask(servicer, "a", num_samples)))
    assert isinstance(refused, ValueError) and f"n is {num_samples}" in str(refused)
    assert servicer.sent == []


def test_request_when_banyan_is_off_then_the_servicer_does_as_it_does(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    servicer = Servicer()
    first, second = (embed(servicer, "", 2**32 - 1) for _ in range(2))
    assert asyncio.run(answered(servicer, first)) == asyncio.run(answered(servicer, second))
    assert servicer.sent == ["", ""]
