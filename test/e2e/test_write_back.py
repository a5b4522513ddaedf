# SPDX-License-Identifier: Apache-2.0
"""Pool and arena hold more together than either: what leaves the pool goes down when it leaves."""

import pytest
from test.e2e.conftest import ARGS, CPU, MODEL, Client

from banyan.planner.answer_reuse import LEAST_JUDGED
from benchmark.servers import ServerSpec, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

PAGE = 16
SIZES = ("--max-total-tokens", "1600", "--banyan-host-gb", "0.014")
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


def test_prompts_when_each_leaves_the_answer_before_out_then_answers_make_room_for_them(client, prompt):
    """As where a template strips a model's thoughts: prompts and answers do not fit pool and arena, prompts do."""
    client.post("/flush_cache?timeout=30", {})

    def ask(name, num_tokens, answer_tokens, left_out=0):
        return client.generate(
            [*prompt(name, num_tokens), *prompt(f"{name} goes on", left_out)], num_tokens=answer_tokens, rank=0
        )

    for number in range(LEAST_JUDGED):
        ask(f"short-{number}", 2 * PAGE + 8, PAGE)
        ask(f"short-{number}", 2 * PAGE + 8, 1, left_out=2 * PAGE)
    (rank, *_) = client.ranks().values()
    answer_pages, prompt_pages = 12, PROMPT_TOKENS // PAGE
    assert NUM_PROMPTS * (prompt_pages + answer_pages) > rank["num_arena_frames"] + rank["num_pool_pages"]
    for number in range(NUM_PROMPTS):
        ask(f"long-{number}", PROMPT_TOKENS + 1, answer_pages * PAGE)
    for number in range(NUM_PROMPTS):
        _, meta = ask(f"long-{number}", PROMPT_TOKENS + 1, 1, left_out=PAGE)
        assert meta["cached_tokens"] >= PROMPT_TOKENS - 4 * PAGE, f"prompt {number}: {meta}"
