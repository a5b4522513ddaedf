# SPDX-License-Identifier: Apache-2.0
"""Stock SGLang with the CPU engine: its attention, a dispatcher that waits, stock's tokens, and nothing shared."""

import json
import time

import pytest
from test.e2e.conftest import Client
from test.e2e.test_hostile import ENGINE, prompt

from banyan_cpu_engine import ATTENTION_BACKEND
from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
IDLE_S = 2.0
PROMPTS = [prompt(num_tokens, seed) for seed, num_tokens in enumerate((40, 200, 333))]


@pytest.fixture(scope="module")
def started(alone, tmp_path_factory):
    """Starts servers that are stock but for what is named."""
    model, logs = models.ensure(models.LLAMA), tmp_path_factory.mktemp("engine")
    args, env = (*ENGINE, "--page-size", "16"), (*cpu_env(dp=2), *ENV)
    return lambda share: ForkedServer(ServerSpec(share, 2, share, args, env), model, logs)


def answers(client):
    """Every prompt twice on rank 0, then on rank 1: ``(output ids, tokens found)`` of each."""
    asked = [(ids, rank) for ids in PROMPTS for rank in (0, 0, 1)]
    told = (client.generate(ids, rank=rank) for ids, rank in asked)
    return [(output, info["cached_tokens"]) for output, info in told]


def test_stock_server_when_it_has_the_engine_then_it_attends_with_it_shares_nothing_and_answers_as_stock(started):
    with started("engine") as server:
        wait_ready([server])
        client = Client(server)
        ours = answers(client)
        info = json.loads(client.get("/server_info"))
        assert info["attention_backend"] == ATTENTION_BACKEND
        assert not info["enable_unified_cache_external_linker"]
        assert all("banyan" not in state for state in info["internal_states"])
        began_s, before_s = time.monotonic(), server.cpu_s()
        time.sleep(IDLE_S)
        # Stock's dispatcher would have kept a core busy.
        used_s = {process: used - before_s.get(process, 0.0) for process, used in server.cpu_s().items()}
        assert max(used_s.values()) < (time.monotonic() - began_s) / 4, used_s
        assert "banyan: " not in server.log_path.read_text()
    with started("stock") as server:
        wait_ready([server])
        theirs = answers(Client(server))
        assert json.loads(Client(server).get("/server_info"))["attention_backend"] == "torch_native"
    assert ours == theirs
    for fresh, again, elsewhere in zip(*[iter(ours)] * 3, strict=True):
        assert fresh[1] == elsewhere[1] == 0 and again[1] > 0
