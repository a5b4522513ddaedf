# SPDX-License-Identifier: Apache-2.0
"""Draft rows come with their pages: as many drafts are accepted behind fetched pages as behind a rank's own.

Tokens cannot tell, for the model verifies every draft. So the forwards that verify are counted; and pages that travel
without their draft rows, on purpose, must show in that count and nowhere else. The drafts are good, so that many are
accepted: of replicas the model drafts for itself, and of ranks in step, for which SGLang takes no such draft, the
model's next layer is its last one again.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from test.e2e.conftest import Client

from benchmark.modes import asking, models
from benchmark.modes.asking import LOGIT_TOLERANCE
from benchmark.modes.rows import CHAIN, EAGLE_OF_ITSELF, IN_PYTHON, IN_STEP_TOO
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
FLAGS = ("--device", "cpu", "--max-total-tokens", "8000", "--sleep-on-idle", "--banyan-plan", "move")
NUM_TOKENS, PAGE_TOKENS = 24, 16
DAMAGE = Path(__file__).parents[1] / "gpu" / "without_draft_rows"


@dataclass(frozen=True)
class Drafting:
    """Two ranks that draft. ``dp``: replicas. ``most_verified``: forwards that verify, for each token; where no draft
    is ever accepted it is 0.96."""

    shape: models.Shape
    dp: int
    flags: tuple[str, ...]
    most_verified: float

    def serve(self, folder, *paths):
        model = models.ensure(self.shape)
        flags = [flag.replace("{model}", str(model)) for flag in self.flags]
        found = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = (*cpu_env(dp=2), *ENV, *IN_PYTHON, ("PYTHONPATH", found))
        return ForkedServer(ServerSpec("drafts", self.dp, "on", (*FLAGS, *flags), env), model, folder)


ITSELF = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "{model}", *CHAIN)
REPLICAS = Drafting(models.LLAMA, 2, ITSELF, most_verified=0.7)
IN_STEP = Drafting(models.MLA_MTP, 1, (*IN_STEP_TOO, *EAGLE_OF_ITSELF), most_verified=0.85)
both_kinds = pytest.mark.parametrize("drafting", [REPLICAS, IN_STEP], ids=["replicas", "in step"])


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


@both_kinds
def test_drafts_when_pages_are_fetched_then_as_many_are_accepted_as_behind_own_pages(alone, tmp_path, drafting):
    with drafting.serve(tmp_path) as server:
        wait_ready([server])
        counts = ask_both(Client(server))
    assert all(own == fetched for own, fetched in counts), counts
    assert sum(own for own, _ in counts) < drafting.most_verified * len(counts) * NUM_TOKENS, (
        "hardly any draft is accepted"
    )


@both_kinds
def test_drafts_when_their_rows_stay_behind_then_fewer_are_accepted_and_tokens_are_the_same(alone, tmp_path, drafting):
    with drafting.serve(tmp_path, DAMAGE) as server:
        wait_ready([server])
        counts = ask_both(Client(server))
    own, fetched = (sum(column) for column in zip(*counts, strict=True))
    assert fetched > 1.1 * own, counts


def test_drafts_when_ranks_in_step_have_other_numbers_of_requests_then_each_is_answered_as_alone(alone, tmp_path):
    """SGLang fills the batch of the one up to that of the other, or has a rank go through a step with nothing to do."""
    asked = asking.prompts(12)
    ranks = [number % 3 // 2 for number in range(len(asked))]
    with IN_STEP.serve(tmp_path) as server:
        wait_ready([server])
        client = Client(server)
        ask = asking.tokens(server.url)
        alone_at = [ask(ids, 1 - rank) for ids, rank in zip(asked, ranks, strict=True)]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(ask, asked, ranks))
        assert client.total("fetches") > 0 and client.total("fetches_failed") == 0
    assert asking.tokens_from(together)["peer"] > 0
    assert asking.widest(together, alone_at) <= LOGIT_TOLERANCE
