# SPDX-License-Identifier: Apache-2.0
"""Pool and arena hold more together than either: what leaves the pool goes down when it leaves."""

import pytest
from test.e2e.conftest import ARGS, CPU, MODEL, Client

from benchmark.servers import ServerSpec, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

PAGE = 16
SIZES = ("--max-total-tokens", "1600", "--banyan-host-gb", "0.07")
"""A hundred pages each, of a rank: what comes up lies in both for a moment."""
NUM_PROMPTS = 5
PROMPT_TOKENS = 480


@pytest.fixture(scope="module")
def client(alone, tmp_path_factory):
    args = (*ARGS, *SIZES, "--banyan-plan", "move", "--enable-metrics")
    with ForkedServer(ServerSpec("write-back", 2, "on", args, CPU), MODEL, tmp_path_factory.mktemp("logs")) as server:
        wait_ready([server])
        yield Client(server)


def test_prompts_when_they_fit_pool_and_arena_together_then_all_come_back_with_the_same_tokens(client, prompt):
    (rank, *_) = client.ranks().values()
    num_pages = NUM_PROMPTS * PROMPT_TOKENS // PAGE
    num_arena, num_pool = rank["num_arena_frames"], rank["num_pool_pages"]
    assert max(num_arena, num_pool) < 0.7 * num_pages and num_pages < num_arena + num_pool
    prompts = [prompt(f"turn-{number}", PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    expected = [client.generate(ids, rank=0)[0] for ids in prompts]
    for turn in range(2):
        for number, ids in enumerate(prompts):
            output, meta = client.generate(ids, rank=0)
            assert output == expected[number]
            assert meta["cached_tokens"] >= PROMPT_TOKENS - 4 * PAGE, f"turn {turn}, prompt {number}: {meta}"
    assert client.total("fetches_failed") == client.total("backups_failed") == 0


def test_prompt_when_it_lies_in_the_pool_of_one_rank_and_in_its_part_of_the_arena_then_the_other_rank_finds_it(
    client, prompt
):
    prompts = [prompt(f"turn-{number}", PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    for number, ids in enumerate(prompts):
        output, meta = client.generate(ids, rank=1)
        assert output == client.generate(ids, rank=0)[0]
        assert meta["cached_tokens"] >= PROMPT_TOKENS - 4 * PAGE, f"prompt {number}: {meta}"
