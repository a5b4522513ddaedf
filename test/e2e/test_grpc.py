# SPDX-License-Identifier: Apache-2.0
"""A server that speaks gRPC: its servicer speaks to the ranks, past the checks of SGLang's main process."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as messages
from test.e2e.conftest import ARGS, CPU, MODEL

from benchmark.modes.by_grpc import GrpcServer
from benchmark.modes.rows import GRPC, NO_WARM_UP
from benchmark.servers import ServerSpec, wait_ready

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
    ):
        # One for each rank.
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                server.answers(bad_ids, messages.SamplingParams(**{"max_new_tokens": 4, **sampling}))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, sampling
    assert server.is_running()
    assert [server.tokens()(ids, None).said for _ in range(2)] == [right.said] * 2
