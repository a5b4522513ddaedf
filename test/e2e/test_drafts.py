# SPDX-License-Identifier: Apache-2.0
"""Draft rows come with their pages: as many drafts are accepted behind fetched pages as behind a rank's own.

Tokens cannot tell, for the model verifies every draft. So the forwards that verify are counted; and pages that travel
without their draft rows, on purpose, must show in that count and nowhere else. The model drafts for itself, so that
many drafts are accepted.
"""

import os
from pathlib import Path

import pytest
from test.e2e.conftest import Client

from benchmark.modes import asking, models
from benchmark.modes.rows import CHAIN, IN_PYTHON
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e
FLAGS = ("--device", "cpu", "--max-total-tokens", "8000", "--sleep-on-idle", "--banyan-plan", "move")
NUM_TOKENS, PAGE_TOKENS = 24, 16
DAMAGE = Path(__file__).parents[1] / "gpu" / "without_draft_rows"


def serve(folder, *paths):
    model = models.ensure(models.LLAMA)
    drafting = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model), *CHAIN)
    found = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = (*cpu_env(dp=2), *IN_PYTHON, ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"), ("PYTHONPATH", found))
    return ForkedServer(ServerSpec("drafts", 2, "on", (*FLAGS, *drafting), env), model, folder)


def ask_both(client):
    """For each prompt: what the rank that has its pages says, and what the other one does, which fetches them."""
    answers = []
    for ids in asking.prompts():
        # One token behind whole pages is computed in another way: Banyan moves a page less there.
        ids = ids[: len(ids) - (len(ids) % PAGE_TOKENS == 1)]
        client.generate(ids, rank=0, num_tokens=NUM_TOKENS)
        own, fetched = (client.generate(ids, rank=rank, num_tokens=NUM_TOKENS) for rank in (0, 1))
        assert own[0] == fetched[0], "a draft never changes a token"
        assert fetched[1]["cached_tokens_details"]["peer"] == own[1]["cached_tokens"] > 0
        answers.append((own[1]["spec_verify_ct"], fetched[1]["spec_verify_ct"]))
    return answers


def test_drafts_when_pages_are_fetched_then_as_many_are_accepted_as_behind_own_pages(alone, tmp_path):
    with serve(tmp_path) as server:
        wait_ready([server])
        counts = ask_both(Client(server))
    assert all(own == fetched for own, fetched in counts), counts
    assert sum(own for own, _ in counts) < 0.7 * len(counts) * NUM_TOKENS, "hardly any draft is accepted"


def test_drafts_when_their_rows_stay_behind_then_fewer_are_accepted_and_tokens_are_the_same(alone, tmp_path):
    with serve(tmp_path, DAMAGE) as server:
        wait_ready([server])
        counts = ask_both(Client(server))
    own, fetched = (sum(column) for column in zip(*counts, strict=True))
    assert fetched > 1.1 * own, counts
