# SPDX-License-Identifier: Apache-2.0
"""A model with linear attention on the engine's CUDA path, without a GPU: SGLang's own kernels are interpreted, pages
and states move on streams that run as late as the waits allow. Tokens are those of the rank that computed the prompt,
wherever its prefix comes from."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from test.e2e.conftest import Client, until
from test.e2e.test_cuda_path import COMPUTING, STAND_IN, STORED, VARIABLE, OnStandIn, came_from, published, python_path

from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.further]
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 3, 100, 3
KEPT_TOKENS = (PROMPT_TOKENS - 1) // models.STATE_TOKENS * models.STATE_TOKENS
"""As far as there is a state."""
SWAPPED = STAND_IN / "with_swapped_states"
ENGINE = (
    # Triton's interpreter reckons in numpy, which has no bf16; and SGLang's kernels take no float32.
    *("--dtype", "float16", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", str(models.STATE_TOKENS)),
    # Four of the prompts have room.
    *("--max-total-tokens", "512", "--page-size", "16", "--context-length", "512", "--max-running-requests", "4"),
    *("--max-mamba-cache-size", "20", "--chunked-prefill-size", "64", "--banyan-plan", "move"),
    "--sleep-on-idle",
)


def serve(folder, label, *flags, paths=()):
    path = ("PYTHONPATH", python_path(STAND_IN, *paths))
    env = (*ENV, *COMPUTING.items(), (VARIABLE, "late"), path, ("SGLANG_MAMBA_CONV_DTYPE", "float16"))
    return OnStandIn(ServerSpec(label, 2, "on", (*ENGINE, *flags), env), models.ensure(models.STATE), folder)


@pytest.fixture(scope="module")
def prompts():
    drawn = random.Random(3)
    return [models.random_prompt(drawn, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]


def crowd(client):
    """Prompts that push everything else out of both pools."""
    drawn = random.Random(5)
    others = [(models.random_prompt(drawn, PROMPT_TOKENS), number % 2) for number in range(10)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda asked: client.generate(asked[0], rank=asked[1], num_tokens=1), others))


def test_states_when_they_come_from_a_peer_the_arena_or_the_store_then_tokens_are_those_of_who_computed_them(
    alone, tmp_path, prompts
):
    store = (*STORED, str(tmp_path / "store"))
    with serve(tmp_path, "states", *store) as server:
        wait_ready([server])
        client = Client(server)
        expected = []
        for ids in prompts:
            tokens, meta = client.generate(ids, rank=0, num_tokens=NUM_TOKENS)
            assert meta["cached_tokens"] == 0
            published(client, 0)
            again, meta = client.generate(ids, rank=1, num_tokens=NUM_TOKENS)
            assert again == tokens and came_from(meta)["peer"] == KEPT_TOKENS
            expected.append(tokens)
        crowd(client)
        again, meta = client.generate(prompts[0], rank=0, num_tokens=NUM_TOKENS)
        assert again == expected[0] and came_from(meta)["host"] == KEPT_TOKENS
        assert client.total("fetches_failed") == 0
        until(lambda: client.total("archived_pages") > 0)

    with serve(tmp_path, "again", *store) as server:
        wait_ready([server])
        client = Client(server)
        for number, (ids, tokens) in enumerate(zip(prompts, expected, strict=True)):
            again, meta = client.generate(ids, rank=number % 2, num_tokens=NUM_TOKENS)
            assert again == tokens and came_from(meta)["storage"] + came_from(meta)["host"] == KEPT_TOKENS
        assert client.total("read_pages") > 0


def test_states_when_two_have_changed_places_then_tokens_differ(alone, tmp_path, prompts):
    """Or nothing here could fail."""
    with serve(tmp_path, "swapped", paths=[SWAPPED]) as server:
        wait_ready([server])
        client = Client(server)
        computed = [client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] for ids in prompts[:2]]
        published(client, 0)
        fetched = [client.generate(ids, rank=1, num_tokens=NUM_TOKENS) for ids in prompts[:2]]
        assert sum(came_from(meta)["peer"] for _, meta in fetched) > 0
        assert [tokens for tokens, _ in fetched] != computed
