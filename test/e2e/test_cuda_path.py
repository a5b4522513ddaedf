# SPDX-License-Identifier: Apache-2.0
"""The engine's CUDA path without a GPU: two ranks on the stand-in (``test/cuda_stand_in``), whose queues run as late as
the waits allow, or by chance. Tokens are those that another library computes, wherever a prefix comes from."""

import os
import random
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test.cuda_stand_in.cuda_stand_in import VARIABLE
from test.cuda_stand_in.cuda_stand_in.engine import ENVIRONMENT
from test.e2e.conftest import Client, until
from transformers import AutoModelForCausalLM

from benchmark.modes import asking, models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, wait_ready
from benchmark.warm import ForkedServer, Nursery

pytestmark = [pytest.mark.e2e, pytest.mark.further]
PAGE_TOKENS, NUM_TOKENS, POOL_TOKENS = 16, 6, 1500
STAND_IN = Path(__file__).parents[1] / "cuda_stand_in"
WITHOUT_WAITS = STAND_IN / "without_waits"
ENGINE = (
    *("--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--max-total-tokens", str(POOL_TOKENS), "--page-size", str(PAGE_TOKENS), "--context-length", "1024"),
    # A fetch comes between two forwards of one prompt, too.
    *("--chunked-prefill-size", "256", "--banyan-plan", "move", "--sleep-on-idle"),
)


def python_path(*first):
    return os.pathsep.join(map(str, (*first, os.environ.get("PYTHONPATH", "")))).rstrip(os.pathsep)


STORED = ("--banyan-host-gb", "0.25", "--banyan-store-admit", "first", "--banyan-store")
WITHOUT_HANDLES = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Pools that no other process can open."""


COMPUTING = {
    **ENVIRONMENT,
    # Tests of the CPU engine set it for the whole process that runs them.
    "SGLANG_USE_CPU_ENGINE": "0",
    "OMP_NUM_THREADS": "1",
    # What SGLang compiles, it compiles in a folder of its own: the other servers' is locked meanwhile.
    "TORCH_EXTENSIONS_DIR": str(Path("build/stand_in").resolve()),
}


class OnStandIn(ForkedServer):
    """A server for which everything was imported on the stand-in."""

    nursery = Nursery({**COMPUTING, VARIABLE: "late", "PYTHONPATH": python_path(STAND_IN)})


def serve(folder, label, *flags, order, paths=(), variables=()):
    env = (*ENV, *COMPUTING.items(), (VARIABLE, order), ("PYTHONPATH", python_path(STAND_IN, *paths)), *variables)
    spec = ServerSpec(label, 2, "on", (*ENGINE, *flags), env)
    return OnStandIn(spec, models.ensure(models.LLAMA), folder)


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of some prompts, by another library."""
    made = AutoModelForCausalLM.from_pretrained(models.ensure(models.LLAMA), dtype=torch.float32)

    def tokens(ids):
        with torch.no_grad():
            out = made.generate(
                torch.tensor([ids]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        return out[0, len(ids) :].tolist()

    return [(ids, tokens(ids)) for ids in asking.prompts(4)]


def came_from(meta):
    details = meta["cached_tokens_details"] or {}
    return {source: details.get(source, 0) for source in asking.SOURCES}


def whole_pages(ids):
    return (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS


def published(client, rank):
    """Return when peers may have all that the rank has computed: SGLang keeps it locked until then, which is some steps
    behind the answer."""
    until(lambda: not client.ranks()[rank]["num_locked_tokens"])


def backed_up(client, expected, before=0):
    """Return when these prompts have been copied down to the arena, behind the pages that had been ``before``."""
    num_pages = sum(whole_pages(ids) for ids, _ in expected) // PAGE_TOKENS
    until(lambda: client.total("backed_up_pages") >= before + num_pages)


def release_memory(client):
    """Have all ranks give it away: one that has just answered is busy for a step or two, and refuses."""

    def is_released():
        try:
            client.post("/release_memory_occupation", {})
        except urllib.error.HTTPError as refused:
            assert refused.code == 400
            return False
        return True

    until(is_released)


def crowd(client):
    """Prompts that push everything else out of both pools."""
    drawn = random.Random(5)
    for number in range(12):
        ids = [drawn.randrange(models.FIRST_PLAIN_TOKEN, models.VOCABULARY) for _ in range(400)]
        client.generate(ids, rank=number % 2, num_tokens=1)


def test_prefix_when_it_comes_from_a_peer_the_arena_or_the_store_then_tokens_are_another_librarys(
    alone, tmp_path, expected
):
    store = (*STORED, str(tmp_path / "store"))
    with serve(tmp_path, "late", *store, order="late") as server:
        wait_ready([server])
        client = Client(server)
        for ids, tokens in expected:
            assert client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] == tokens
            published(client, 0)
            again, meta = client.generate(ids, rank=1, num_tokens=NUM_TOKENS)
            assert again == tokens and came_from(meta)["peer"] == whole_pages(ids)
        backed_up(client, expected)
        crowd(client)
        answers = [(client.generate(ids, rank=0, num_tokens=NUM_TOKENS), tokens) for ids, tokens in expected]
        assert [told for (told, _), _ in answers] == [tokens for _, tokens in answers]
        assert sum(came_from(meta)["host"] for (_, meta), _ in answers) > 0.8 * sum(len(ids) for ids, _ in expected)
        assert client.total("fetches_failed") == 0
        until(lambda: client.total("archived_pages") > 0)

    with serve(tmp_path, "chance", *store, order="7") as server:
        wait_ready([server])
        client = Client(server)
        for number, (ids, tokens) in enumerate(expected):
            first, meta = client.generate(ids, rank=number % 2, num_tokens=NUM_TOKENS)
            assert first == tokens and came_from(meta)["storage"] + came_from(meta)["host"] > 0
            published(client, number % 2)
            second, meta = client.generate(ids, rank=1 - number % 2, num_tokens=NUM_TOKENS)
            assert second == tokens and came_from(meta)["peer"] + came_from(meta)["host"] > 0
        assert client.total("read_pages") > 0
        crowd(client)
        # All at once: the pools have room for three of the prompts, and peers read what is being evicted.
        wanted = [(ids, tokens[:1], rank) for ids, tokens in expected for rank in (0, 1)] * 2
        with ThreadPoolExecutor(len(wanted)) as threads:
            firsts = list(threads.map(lambda ask: client.generate(ask[0], rank=ask[2], num_tokens=1)[0], wanted))
        assert firsts == [first for _, first, _ in wanted] and client.total("fetches_failed") == 0


def test_prefix_when_no_pool_can_be_opened_then_it_comes_by_the_arena_alone(alone, tmp_path, expected):
    arena = ("--banyan-host-gb", "0.25")
    with serve(tmp_path, "staged", *arena, order="3", variables=[WITHOUT_HANDLES]) as server:
        wait_ready([server])
        client = Client(server)
        for ids, tokens in expected:
            assert client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] == tokens
        backed_up(client, expected)
        answers = [(client.generate(ids, rank=1, num_tokens=NUM_TOKENS), tokens) for ids, tokens in expected]
        assert [told for (told, _), _ in answers] == [tokens for _, tokens in answers]
        assert [came_from(meta)["peer"] for (_, meta), _ in answers] == [0] * len(expected)
        assert [came_from(meta)["host"] for (_, meta), _ in answers] == [whole_pages(ids) for ids, _ in expected]


@pytest.mark.parametrize("order", ["late", "5"])
def test_prompts_when_they_fit_pool_and_arena_together_then_all_come_back_with_the_same_tokens(
    alone, tmp_path, expected, order
):
    num_pages, num_frames = 40, 50
    fields = {**models.COMMON, **models.LLAMA.fields}
    rows = fields["num_hidden_layers"] * 2 * fields["num_key_value_heads"]
    arena_bytes = 2 * num_frames * 4 * PAGE_TOKENS * rows * fields["head_dim"]
    sizes = ("--max-total-tokens", str(num_pages * PAGE_TOKENS), "--banyan-host-gb", f"{arena_bytes / 2**30:.9f}")
    with serve(tmp_path, "write-back", *sizes, order=order) as server:
        wait_ready([server])
        client = Client(server)
        for rank in (0, 0, 0, 1):
            found = 0
            for ids, tokens in expected:
                told, meta = client.generate(ids, rank=rank, num_tokens=NUM_TOKENS)
                assert told == tokens
                found += meta["cached_tokens"]
        assert num_pages < num_frames < sum(len(ids) for ids, _ in expected) / PAGE_TOKENS < num_pages + num_frames
        # The reserve takes an eighth of the pool.
        assert found > 0.75 * sum(whole_pages(ids) for ids, _ in expected)
        assert client.total("fetches_failed") == client.total("backups_failed") == 0


@pytest.mark.parametrize(
    ("flags", "is_exact"), [(("--tp", "2"), True), (("--kv-cache-dtype", "fp8_e4m3"), False)], ids=["shards", "fp8 KV"]
)
def test_prefix_when_ranks_have_two_shards_or_keep_other_numbers_then_the_tokens_are_those_of_who_computed_it(
    alone, tmp_path, expected, flags, is_exact
):
    with serve(tmp_path, "variant", *flags, order="3") as server:
        wait_ready([server])
        client = Client(server)
        for ids, tokens in expected:
            first, _ = client.generate(ids, rank=0, num_tokens=NUM_TOKENS)
            published(client, 0)
            again, meta = client.generate(ids, rank=1, num_tokens=NUM_TOKENS)
            assert again == first and came_from(meta)["peer"] == whole_pages(ids)
            assert first == tokens or not is_exact


def test_prefix_when_no_layer_waits_for_its_copy_then_tokens_differ(alone, tmp_path, expected):
    """Or nothing here could fail."""
    with serve(tmp_path, "damaged", order="late", paths=[WITHOUT_WAITS]) as server:
        wait_ready([server])
        client = Client(server)
        differ = []
        for ids, tokens in expected:
            assert client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] == tokens
            published(client, 0)
            again, meta = client.generate(ids, rank=1, num_tokens=NUM_TOKENS)
            assert came_from(meta)["peer"] == whole_pages(ids)
            differ.append(again != tokens)
    assert any(differ)


def test_memory_when_it_is_given_back_and_comes_again_then_ranks_share_by_the_arena_as_before(
    alone, tmp_path, expected
):
    """Whoever touches the pool meanwhile ends with a signal. It comes back without its bytes."""
    flags = ("--banyan-host-gb", "0.25", "--enable-memory-saver", "--enable-weights-cpu-backup")
    with serve(tmp_path, "saver", *flags, order="late") as server:
        wait_ready([server])
        client = Client(server)
        for _ in range(2):
            for ids, tokens in expected:
                first, meta = client.generate(ids, rank=0, num_tokens=NUM_TOKENS)
                assert first == tokens and meta["cached_tokens"] == 0
            # At once: copies down to the arena are under way.
            release_memory(client)
            assert [rank["num_published_pages"] for rank in client.ranks().values()] == [0, 0]
            client.post("/resume_memory_occupation", {})
        before = client.total("backed_up_pages")
        for ids, _ in expected:
            client.generate(ids, rank=0, num_tokens=NUM_TOKENS)
        backed_up(client, expected, before)
        answers = [(client.generate(ids, rank=1, num_tokens=NUM_TOKENS), tokens) for ids, tokens in expected]
        assert [told for (told, _), _ in answers] == [tokens for _, tokens in answers]
        assert [came_from(meta)["host"] for (_, meta), _ in answers] == [whole_pages(ids) for ids, _ in expected]
        assert client.total("fetches_failed") == 0
