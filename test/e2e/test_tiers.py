# SPDX-License-Identifier: Apache-2.0
"""Pages that left every pool come back from DRAM, and after a restart from the store: one server, started again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from test.e2e.conftest import ARGS, CPU, MODEL, Client, until

from banyan._native import store_survey
from banyan.telemetry import SERIES
from benchmark.alternatives.kept import wait_until_still
from benchmark.servers import ServerSpec, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

PAGE = 16
STILL_S = 2.0
"""A counter that has not changed for so long is taken to stay."""

POOL_ARGS = ("--max-total-tokens", "1600")
STORE_ARGS = ("--enable-metrics", "--banyan-host-gb", "1", "--banyan-store-gb", "4", "--banyan-store-admit", "first")


class Restartable:
    """The server under test; ``restart`` stops it and starts it again on the same store."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self._logs = folder / "logs"
        self.client = self._start()

    def _start(self, *more: str) -> Client:
        args = (*ARGS, *POOL_ARGS, *STORE_ARGS, "--banyan-store", f"file://{self.store}", *more)
        spec = ServerSpec("tiers", 2, "on", args, CPU)
        self.server = ForkedServer(spec, MODEL, self._logs)
        wait_ready([self.server])
        return Client(self.server)

    def restart(self, *more: str) -> None:
        self.server.stop()
        self.client = self._start(*more)

    def crash(self, *more: str) -> None:
        self.server.kill()
        self.client = self._start(*more)


@pytest.fixture(scope="module")
def tiers(alone, tmp_path_factory) -> Iterator[Restartable]:
    started = Restartable(tmp_path_factory.mktemp("tiers"))
    yield started
    started.server.stop()


def settled(client: Client, name: str) -> int:
    """The sum of a counter, once what was begun has ended: copies down to the arena follow the request they are of."""
    seen = []

    def look() -> int:
        seen.append(client.total(name))
        return seen[-1]

    assert wait_until_still(look, timeout_s=60, still_s=STILL_S), f"{name} does not come to rest: {seen}"
    return seen[-1]


def num_stored(client: Client) -> int:
    """Pages stored, once nothing is on its way: what is being written holds its frame of the arena."""
    settled(client, "backed_up_pages")
    until(lambda: not sum(rank["store"]["backlog_pages"] for rank in client.ranks().values()))
    return settled(client, "archived_pages")


def in_store(client: Client, ids: list[int]) -> list[int]:
    """The answer to a new prompt, once the store has all pages of both."""
    before = num_stored(client)
    output, _ = client.generate(ids, rank=0)
    # Without the last token of the answer, which no page holds yet.
    num_pages = (len(ids) + len(output) - 1) // PAGE
    until(lambda: client.total("archived_pages") >= before + num_pages)
    return output


def in_arena(client: Client, ids: list[int], *, rank: int) -> tuple[int, float]:
    """The first token behind a new prompt, once that is in the arena: what is not gives way last in the pool."""
    before = client.total("backed_up_pages")
    first = client.first_token(ids, rank=rank)
    until(lambda: client.total("backed_up_pages") >= before + len(ids) // PAGE)
    return first


def crowd_out(ask: Callable[..., object], prompt, name: str) -> None:
    """Fill both pools with other prompts."""
    for number in range(2):
        for rank in (0, 1):
            ask(prompt(f"{name}-{number}-{rank}", 850), rank=rank)


def test_prefix_when_it_has_left_both_pools_then_either_rank_takes_it_from_the_arena(tiers, prompt):
    client = tiers.client
    for rank in (1, 0):
        # Each rank its own prompt: one that has come twice is worth more than the crowd, and stays.
        ids = prompt(f"arena-{rank}", 600)
        token, log_probability = in_arena(client, ids, rank=0)
        crowd_out(partial(in_arena, client), prompt, f"crowd-{rank}")
        before = settled(client, "backed_up_pages")
        _, meta = client.generate(ids, rank=rank, num_tokens=1)
        details = meta["cached_tokens_details"]
        assert details["host"] >= 600 - 2 * PAGE, f"rank {rank}: {details}"
        assert settled(client, "backed_up_pages") == before, "what the arena holds is not copied down again"
        again, log_probability_again = client.first_token(ids, rank=rank)
        assert again == token and log_probability_again == pytest.approx(log_probability, abs=0.02)


def test_arena_when_both_ranks_hold_the_same_prompt_then_one_copy_for_the_node(tiers, prompt):
    client = tiers.client
    ids = prompt("once", 400)
    before = settled(client, "backed_up_pages")
    client.first_token(ids, rank=0)
    until(lambda: client.total("backed_up_pages") == before + 400 // PAGE)
    client.first_token(ids, rank=1)
    client.first_token(ids, rank=1)
    assert settled(client, "backed_up_pages") == before + 400 // PAGE


def test_prefix_when_the_server_was_restarted_then_it_comes_from_the_store_with_the_same_tokens(tiers, prompt):
    asked = {name: prompt(name, 750) for name in ("monday", "tuesday", "wednesday")}
    computed = {name: in_store(tiers.client, ids) for name, ids in asked.items()}
    tiers.restart()
    num_found = 0
    for name, ids in asked.items():
        output, meta = tiers.client.generate(ids, rank=1)
        details = meta["cached_tokens_details"]
        # What has been read when its prompt's turn comes is in the arena by then.
        found = details["storage"] + details["host"]
        assert found >= 0.97 * (len(ids) - PAGE), name
        assert output == computed[name], name
        num_found += found
    until(lambda: tiers.client.total("read_pages") >= num_found // PAGE)
    assert tiers.client.total("read_failed_pages") == 0
    output, meta = tiers.client.generate(asked["monday"], rank=0)
    assert meta["cached_tokens_details"]["storage"] == 0, "it is read once for the node"
    assert output == computed["monday"]


def test_metrics_when_there_is_a_store_then_what_it_tells_is_there(tiers):
    def there():
        return {line.split("{")[0] for line in tiers.client.get("/metrics").splitlines() if line.startswith("banyan:")}

    expected = {series.name for name, series in SERIES.items() if name.startswith("store_") and name != "store_tokens"}
    until(lambda: expected <= there())


def test_request_when_its_pages_are_damaged_on_disk_then_it_is_answered_all_the_same(tiers, prompt):
    ids = prompt("thursday", 750)
    expected = in_store(tiers.client, ids)
    tiers.server.stop()
    damage(tiers.store)
    tiers.restart()
    output, meta = tiers.client.generate(ids, rank=0)
    assert output == expected and tiers.client.total("read_failed_pages") > 0
    assert meta["cached_tokens"] == 0, "run again without the cache"


def damage(store: Path) -> None:
    """Flip a bit in every 64 KiB of every segment."""
    for path in store.rglob("segment-*"):
        if path.is_file():
            with path.open("r+b") as file:
                for offset in range(40_000, path.stat().st_size, 1 << 16):
                    file.seek(offset)
                    byte = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ 1]))


def test_flush_when_the_cache_is_flushed_then_no_tier_answers(tiers, prompt):
    """Also where the rank that stored the end of a prefix is another than the one that stored its front."""
    ids = prompt("friday", 400)
    longer = [*ids, *prompt("friday afternoon", 200)]
    before = tiers.client.total("archived_pages")
    tiers.client.first_token(ids, rank=0)
    until(lambda: tiers.client.total("archived_pages") >= before + 400 // PAGE)
    tiers.client.first_token(longer, rank=1)
    until(lambda: tiers.client.total("archived_pages") >= before + 600 // PAGE)
    for rank in (1, 0):
        tiers.client.post("/flush_cache?timeout=30", {})
        assert store_survey([str(tiers.store)])["num_records"] == 0
        _, meta = tiers.client.generate(longer, rank=rank, num_tokens=1)
        assert meta["cached_tokens"] == 0


def test_prefix_when_it_is_longer_than_the_arena_then_its_beginning_comes_from_the_store_with_the_same_tokens(
    tiers, prompt
):
    ids = prompt("sunday", 850)
    expected = in_store(tiers.client, ids)
    tiers.restart("--banyan-host-gb", "0.004")
    for _ in range(2):
        output, meta = tiers.client.generate(ids, rank=0)
        details = meta["cached_tokens_details"]
        assert output == expected
        assert 300 <= details["storage"] + details["host"] <= 600, f"an arena has room for 29 pages: {details}"
        crowd_out(tiers.client.first_token, prompt, "other")
        num_stored(tiers.client)
    assert tiers.client.total("fetches_failed") == tiers.client.total("read_failed_pages") == 0
    assert "lends 29 at once" in tiers.server.log_path.read_text(errors="replace")


def test_arena_when_the_server_was_killed_then_the_next_one_has_its_pages_in_memory(tiers, prompt):
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as folder:
        keep = ("--banyan-keep-host-arena", folder)
        tiers.restart(*keep)
        ids = prompt("saturday", 600)
        expected, _ = tiers.client.generate(ids, rank=0)
        until(lambda: tiers.client.total("kept_pages") >= 600 // PAGE)
        tiers.crash(*keep)
        output, meta = tiers.client.generate(ids, rank=1)
        details = meta["cached_tokens_details"]
        assert details["host"] >= 600 - 2 * PAGE and details["storage"] == 0, details
        assert output == expected
        tiers.server.stop()
