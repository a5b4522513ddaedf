# SPDX-License-Identifier: Apache-2.0
"""What a server has stored is found by the next one with another ``--tp``, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test.e2e.conftest import Client, until

from banyan._native import store_survey
from banyan.layout import cacheable_tokens
from benchmark.modes import asking, models
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]

PAGE = 16
PROMPTS = asking.prompts(4)
NUM_PAGES = sum(cacheable_tokens(len(ids), PAGE) for ids in PROMPTS) // PAGE
FLAGS = (
    *("--device", "cpu", "--context-length", "2048", "--max-total-tokens", "4000", "--sleep-on-idle"),
    # Sums over two shards round in another way than those of one; so that no token shows it.
    *("--dtype", "float32", "--banyan-plan", "move", "--banyan-host-gb", "0.25"),
    *("--banyan-store-admit", "first", "--banyan-store-gb", "0.5"),
)
ENV = (("SGLANG_NCCL_SO_PATH", "/nonexistent"), ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"))


@contextmanager
def serving(label: str, shape: models.Shape, tp: str, folder: Path) -> Iterator[Client]:
    flags = (*FLAGS, "--tp", *tp.split(), "--banyan-store", str(folder / "store"))
    spec = ServerSpec(label, 1, "on", flags, (*cpu_env(dp=int(tp.split()[0]), num_cores=2), *ENV))
    with ForkedServer(spec, models.ensure(shape), folder) as server:
        wait_ready([server])
        yield Client(server)


def ask_all(client: Client) -> tuple[list[tuple[float, ...]], int]:
    """What it says, and how many pages it had from the store; some are in the arena when their prompt's turn comes."""
    answers = [asking.tokens(client.server.url)(ids, None) for ids in PROMPTS]
    cached = asking.tokens_from(answers)
    return [answer.said for answer in answers], (cached["storage"] + cached["host"]) // PAGE


def wait_stored(client: Client, folder: Path, num_pages: int) -> None:
    """Return when the folder has so many. A page is offered to it when it is asked for and lies in the arena."""

    def is_stored() -> bool:
        if store_survey([str(folder / "store")])["num_records"] >= num_pages:
            return True
        ask_all(client)
        return False

    until(is_stored, timeout_s=120)


@pytest.mark.parametrize(
    ("shape", "writes", "stored_size", "reads", "size"),
    [
        (models.LLAMA, "2", 2, "1", 1),
        (models.LLAMA, "1", 1, "2", 2),
        (models.MOE, "2 --attn-dp-size 2", 1, "2", 2),
    ],
    ids=["2-1", "1-2", "attention-dp"],
)
def test_store_when_the_next_server_has_another_tp_then_all_is_found_with_the_same_tokens_and_stored_anew(
    alone, tmp_path, shape, writes, stored_size, reads, size
):
    with serving("writes", shape, writes, tmp_path) as client:
        computed, num_found = ask_all(client)
        assert num_found == 0
        wait_stored(client, tmp_path, stored_size * NUM_PAGES)
        assert client.total("resharded_pages") == 0
    with serving("reads", shape, reads, tmp_path) as client:
        assert client.ranks()[0]["resharding"] == {"attn_tp_sizes": [stored_size]}
        said, num_found = ask_all(client)
        assert said == computed and num_found == NUM_PAGES
        assert client.total("resharded_pages") == client.total("read_pages") >= NUM_PAGES
        assert client.total("resharded_bytes") == client.total("read_bytes") * max(1, size // stored_size)
        wait_stored(client, tmp_path, (stored_size + size) * NUM_PAGES)


def test_store_of_latents_when_the_next_server_has_another_tp_then_its_pages_are_the_same(alone, tmp_path):
    """Every shard has all of them: nothing is to be put together."""
    with serving("writes", models.MLA, "2", tmp_path) as client:
        computed, _ = ask_all(client)
        wait_stored(client, tmp_path, NUM_PAGES)
    with serving("reads", models.MLA, "1", tmp_path) as client:
        assert "resharding" not in client.ranks()[0]
        said, num_found = ask_all(client)
        assert said == computed and num_found == NUM_PAGES
        assert client.total("resharded_pages") == 0
