# SPDX-License-Identifier: Apache-2.0
"""A model with linear attention: the engine computes what the library transformers does, and a prefix from a peer, the
arena or the store gives the tokens of a server that shares nothing."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test.e2e.conftest import Client
from test.e2e.test_tiers import num_stored
from transformers import AutoModelForCausalLM

from benchmark.modes import asking, models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e
NUM_TOKENS = 8
POOL_TOKENS, CHUNK_TOKENS, COMMON_TOKENS = 2000, 128, 192
COMMON = (
    *("--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--context-length", "2048"),
    *(
        "--max-mamba-cache-size",
        "40",
        "--max-running-requests",
        "8",
        "--mamba-track-interval",
        str(models.STATE_TOKENS),
    ),
    # A prompt is computed in several forwards, so that there are states in the middle of it.
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--sleep-on-idle"),
)
KEPT = ("--banyan-host-gb", "0.25", "--banyan-store-admit", "first", "--banyan-plan", "move")


def serve(folder, label, *flags, dp, share):
    env = (*cpu_env(dp=dp), *ENV, *models.STATE_ENV)
    return ForkedServer(ServerSpec(label, dp, share, (*COMMON, *flags), env), models.ensure(models.STATE), folder)


def expected(ids):
    """Greedy tokens, by another library."""
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(models.ensure(models.STATE), dtype=torch.float32)
        made = model.generate(
            torch.tensor([ids]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    return made[0, len(ids) :].tolist()


def others(count):
    """Prompts that push everything else out of a pool."""
    drawn = random.Random(5)
    return [[drawn.randrange(models.FIRST_PLAIN_TOKEN, models.VOCABULARY) for _ in range(400)] for _ in range(count)]


def came_from(meta, source):
    details = meta["cached_tokens_details"] or {}
    return details.get(source, 0)


def kept_of(num_tokens):
    """As far as there is a state, of a prompt that is asked again."""
    return (num_tokens - 1) // models.STATE_TOKENS * models.STATE_TOKENS


def test_states_when_prefixes_come_from_anywhere_then_tokens_are_those_of_a_server_that_shares_nothing(alone, tmp_path):
    prompts = asking.prompts(4)
    # A conversation that goes on, and two prompts that leave another one in the middle, between two of its states.
    rest = others(3)
    longer = prompts[0] + rest[0][:100]
    branch, second_branch = (prompts[3][: COMMON_TOKENS + 10] + rest[number][:90] for number in (1, 2))
    asked = [*prompts, longer, branch, second_branch]
    store = ("--banyan-store", str(tmp_path / "store"))
    with serve(tmp_path, "off", dp=1, share="off") as off, serve(tmp_path, "on", *KEPT, *store, dp=2, share="on") as on:
        wait_ready([off, on])
        client = Client(off)
        plain = [client.generate(ids, num_tokens=NUM_TOKENS)[0] for ids in asked]
        assert plain[:2] == [expected(ids) for ids in prompts[:2]]

        client = Client(on)
        for ids, tokens in zip(prompts, plain, strict=False):
            assert client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] == tokens
            again, meta = client.generate(ids, rank=1, num_tokens=NUM_TOKENS)
            assert again == tokens and came_from(meta, "peer") == kept_of(len(ids))
        told, meta = client.generate(longer, rank=1, num_tokens=NUM_TOKENS)
        assert told == plain[4] and meta["cached_tokens"] >= kept_of(len(prompts[0]))
        # Rank 0 has the pages of that prompt, and a state where a chunk of it ended: it keeps another one where the
        # branch leaves it, and lets the other rank have it.
        told, meta = client.generate(branch, rank=0, num_tokens=NUM_TOKENS)
        assert told == plain[5] and meta["cached_tokens"] == CHUNK_TOKENS
        told, meta = client.generate(second_branch, rank=1, num_tokens=NUM_TOKENS)
        assert told == plain[6] and meta["cached_tokens"] == COMMON_TOKENS and came_from(meta, "peer") > 0

        # The pools forget, the arena does not.
        for ids in others(12):
            for rank in (0, 1):
                client.generate(ids, rank=rank, num_tokens=1)
        answers = [client.generate(ids, rank=0, num_tokens=NUM_TOKENS) for ids in asked]
        assert [tokens for tokens, _ in answers] == plain
        assert sum(came_from(meta, "host") for _, meta in answers) > 0.6 * sum(len(ids) for ids in prompts)

        # All at once, where slots are short, states are freed and peers read them.
        wanted = [(ids, rank) for ids in asked for rank in (0, 1)]
        with ThreadPoolExecutor(len(wanted)) as threads:
            firsts = list(threads.map(lambda ask: client.generate(ask[0], rank=ask[1], num_tokens=1)[0], wanted))
        assert firsts == [tokens[:1] for tokens in plain for _ in (0, 1)]
        num_failed = client.total("fetches_failed")
        num_given_up = on.log_path.read_text(errors="replace").count("fetch(es) are given up")
        assert num_failed <= num_given_up, "but for those that made way for a rank that stood still"
        # What still waits to be written when a server stops is lost.
        assert num_stored(client) > 0

    with serve(tmp_path, "again", *KEPT, *store, dp=2, share="on") as again:
        wait_ready([again])
        client = Client(again)
        answers = [client.generate(ids, rank=number % 2, num_tokens=NUM_TOKENS) for number, ids in enumerate(asked)]
        assert [tokens for tokens, _ in answers] == plain
        # What has been read before a prompt's turn comes is in the arena by then.
        stored = sum(came_from(meta, source) for _, meta in answers[:4] for source in ("storage", "host"))
        assert stored > 0.6 * sum(len(ids) for ids in prompts) and client.total("read_pages") > 0
