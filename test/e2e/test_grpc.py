# SPDX-License-Identifier: Apache-2.0
"""Servers that speak gRPC: in place of HTTP, where a servicer speaks to the ranks past the checks of SGLang's main
process, and beside HTTP, where that process answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as messages
from test.e2e.conftest import ARGS, CPU, MODEL, Client, until

from benchmark.modes.asking import GREEDY
from benchmark.modes.by_grpc import GrpcServer
from benchmark.modes.rows import GRPC, NO_WARM_UP
from benchmark.servers import ServerSpec, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

VOCABULARY = 49_152


@pytest.fixture(scope="module")
def server(alone, tmp_path_factory) -> Iterator[GrpcServer]:
    spec = ServerSpec("grpc", 2, "on", (*ARGS, *GRPC), (*CPU, *NO_WARM_UP))
    with GrpcServer(spec, MODEL, tmp_path_factory.mktemp("grpc")) as server:
        wait_ready([server])
        yield server


def test_prompt_when_the_other_rank_has_it_then_it_is_fetched_and_the_tokens_are_the_same(server, prompt):
    ids = prompt("grpc", 400)
    before = server.peer_tokens()
    first, second = (server.tokens()(ids, None).said for _ in range(2))
    assert first == second and len(first) == 8
    assert server.peer_tokens() - before == 384


def test_server_when_requests_would_end_its_ranks_then_each_is_refused_and_it_goes_on(server, prompt):
    ids = prompt("grpc, again", 60)
    right = server.tokens()(ids, None)
    for bad_ids, sampling in (
        ([*ids, VOCABULARY], {}),
        ([2**32 - 1], {}),
        ([], {}),
        (ids, {"temperature": 1e30}),
        (ids, {"repetition_penalty": 1e-30}),
        (ids, {"top_p": -1.0}),
        (ids, {"stop_token_ids": [VOCABULARY]}),
        (ids, {"logit_bias": {"1": 1e30}}),
        (ids, {"n": 4097}),
    ):
        # One for each rank.
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                server.answers(bad_ids, messages.SamplingParams(**{"max_new_tokens": 4, **sampling}))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, sampling
    assert server.is_running()
    assert [server.tokens()(ids, None).said for _ in range(2)] == [right.said] * 2


def test_requests_when_they_name_no_id_or_the_same_then_none_gets_the_tokens_of_another(server, prompt):
    prompts = [prompt(f"grpc, {number}", 60) for number in range(4)]
    # By its number of tokens an answer is told from the others.
    asked = [
        (ids, messages.SamplingParams(**GREEDY | {"max_new_tokens": 100 + 10 * n})) for n, ids in enumerate(prompts)
    ]
    with ThreadPoolExecutor(4) as pool:
        unnamed = [pool.submit(server.answers, *one, request_id="") for one in asked]
        assert [len(one.result()) for one in unnamed] == [100, 110, 120, 130]
        named = [pool.submit(server.answers, *one, request_id="taken") for one in asked]
        assert [len(one.result()) for one in named] == [100, 110, 120, 130]
    assert len(server.answers(*asked[1], request_id="taken")) == 110


class BesideHttp:
    """A server that speaks both, asked by gRPC. Of its messages the tests need what holds a body as JSON, in its first
    field; SGLang's package brings no description of them."""

    def __init__(self, server: ForkedServer, port: int) -> None:
        self.server = server
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def complete(self, **body: Any) -> dict[str, Any]:
        asked = json.dumps({"model": "", "max_tokens": 8, "temperature": 0, **body}).encode()
        said = self._called("Complete", b"\x0a" + varint(len(asked)) + asked)
        return json.loads(said[said.index(b"{") : said.rindex(b"}") + 1])

    def flush(self) -> bytes:
        return self._called("FlushCache", b"")

    def _called(self, name: str, message: bytes) -> bytes:
        (said,) = self._channel.unary_stream(f"/sglang.runtime.v1.SglangService/{name}")(message, timeout=60)
        return said


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


@pytest.fixture(scope="module")
def beside(alone, tmp_path_factory) -> Iterator[BesideHttp]:
    port = free_port()
    flags = (*ARGS, "--grpc-port", str(port), "--enable-cache-report")
    with ForkedServer(ServerSpec("beside", 2, "on", flags, CPU), MODEL, tmp_path_factory.mktemp("beside")) as server:
        wait_ready([server])
        yield BesideHttp(server, port)


def test_prompt_when_grpc_is_beside_http_then_it_is_fetched_until_a_flush_and_what_would_end_ranks_is_refused(
    beside, prompt
):
    ids = prompt("beside", 400)
    first, second = (beside.complete(prompt=ids, routed_dp_rank=rank) for rank in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
    # A rank that has just answered would refuse.
    Client(beside.server).wait_for_a_step()
    assert b"flushed" in beside.flush()
    assert not (beside.complete(prompt=ids, routed_dp_rank=1)["usage"]["prompt_tokens_details"] or {}).get(
        "cached_tokens"
    )
    for bad in (
        {"prompt": [*ids, VOCABULARY]},
        {"prompt": ids, "temperature": 1e30},
        {"prompt": ids, "routed_dp_rank": 7},
    ):
        assert beside.complete(**bad)["code"] == 400, bad
    assert beside.server.is_running()


def test_server_when_it_is_told_to_end_then_what_is_new_by_grpc_is_refused_and_it_ends(beside, prompt):
    ids = prompt("beside, at the end", 60)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(beside.complete, prompt=ids, max_tokens=400, ignore_eos=True)
        until(
            lambda: Client(beside.server).num_tokens_at(0) + Client(beside.server).num_tokens_at(1) or under_way.done()
        )
        os.kill(beside.server.pid, signal.SIGTERM)
        until(lambda: beside.complete(prompt=ids, max_tokens=1).get("code") == 503)
        assert under_way.result()["usage"]["completion_tokens"] == 400
    until(lambda: not beside.server.is_running(), timeout_s=60)
