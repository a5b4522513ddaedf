# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's own indexer, from its package, hears a server's events: it believes of pools and arena what is there,
with evictions, flushes and a restart in between."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from test.e2e.conftest import Client, until

from banyan.router.events import BlockRemoved, BlockStored, read_batch
from benchmark.alternatives.kept import wait_until_still
from benchmark.modes import models
from benchmark.servers import Server, ServerSpec, beside, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]

PAGE = 16
NUM_RANKS = 2
NUM_TOLD_PAGES = 10_000
PROMPT_TOKENS = 400
# Twenty prompts of 25 pages in pools of 125 and an arena of 160 pages. A rank that sleeps while it is idle would tell
# what has happened in the arena a second late.
ENGINE = ("--device", "cpu", "--dtype", "bfloat16", "--context-length", "2048")
SMALL = ("--max-total-tokens", "2000", "--banyan-host-gb", "0.01", "--banyan-plan", "move")
INDEXER = "import sys, dynamo._core; dynamo._core.run_kv_indexer(sys.argv[1:])"
MODEL_NAME = "m"


@dataclass(frozen=True)
class Indexer:
    """Dynamo's, with one worker of several ranks."""

    client: Client
    port: int
    replay_port: int

    def register(self) -> None:
        for rank in range(NUM_RANKS):
            where = {
                "endpoint": f"tcp://127.0.0.1:{self.port + rank}",
                "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port + rank}",
            }
            self.client.post("/register", self._worker | where | {"dp_rank": rank, "block_size": PAGE})

    def unregister(self) -> None:
        self.client.post("/unregister", self._worker)

    @property
    def _worker(self) -> dict[str, Any]:
        return {"instance_id": 1, "model_name": MODEL_NAME}

    def believes(self, ids: list[int]) -> dict[str, Any]:
        """Tokens of a prompt: ``dp``, in the pool of each rank; ``longest_matched``, in pool and arena of one."""
        answer = self.client.post("/query", {"token_ids": ids, "model_name": MODEL_NAME})
        return answer["instances"].get("1", {"longest_matched": 0, "dp": {}})


@contextmanager
def indexer(events: dict[str, Any], log: Path) -> Iterator[Indexer]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with beside([sys.executable, "-c", INDEXER, "--port", str(port)], log, f"{url}/workers"):
        ports = (int(events[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint"))
        yield Indexer(Client(SimpleNamespace(url=url)), *ports)


class ToldPages:
    """Counts the pages that the server tells anybody of."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.subscribe(b"")
        for rank in range(NUM_RANKS):
            self._socket.connect(f"tcp://127.0.0.1:{port + rank}")
        self._num = 0

    def num(self) -> int:
        while self._socket.poll(0):
            for event in read_batch(self._socket.recv_multipart()[-1]).events:
                if isinstance(event, BlockStored | BlockRemoved):
                    self._num += len(event.block_hashes)
        return self._num

    def close(self) -> None:
        self._socket.close(0)


class Asker:
    """Asks one rank after the other for prompts that many others begin like."""

    def __init__(self, server: Server) -> None:
        self._client = Client(server)
        self._drawn = random.Random(20261127)
        plain = range(models.FIRST_PLAIN_TOKEN, models.VOCABULARY)
        self.prompts = [self._drawn.choices(plain, k=PROMPT_TOKENS) for _ in range(20)]

    def draw(self) -> tuple[list[int], int]:
        """A prompt and a rank. No page is fetched that would leave a single token (docs/design/0003): more are left."""
        num_tokens = PAGE * self._drawn.randrange(3, PROMPT_TOKENS // PAGE) + self._drawn.randrange(2, PAGE)
        return self._drawn.choice(self.prompts)[:num_tokens], self._drawn.randrange(NUM_RANKS)

    def ask(self, ids: list[int], rank: int) -> dict[str, int]:
        """Tokens that were cached, by where."""
        body = {"input_ids": ids, "routed_dp_rank": rank, "sampling_params": {"max_new_tokens": 1}}
        meta = self._client.post("/generate", body)["meta_info"]
        return {"all": meta["cached_tokens"], "device": 0} | (meta["cached_tokens_details"] or {})

    def wait_for_a_step(self) -> None:
        self._client.wait_for_a_step()

    def flush(self) -> None:
        self._client.post("/flush_cache?timeout=30", {})


@pytest.fixture
def served(alone, tmp_path):
    """A server with an indexer that hears it, and what starts the server again."""
    events = {"publisher": "zmq", "bind": True}
    events |= {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    flags = (*ENGINE, *SMALL, "--kv-events-config", json.dumps(events))
    spec = ServerSpec("told", NUM_RANKS, "on", flags, cpu_env(dp=NUM_RANKS))
    servers = [ForkedServer(spec, models.ensure(models.LLAMA), tmp_path)]

    def restart() -> Server:
        servers[0].stop()
        servers[0] = ForkedServer(spec, models.ensure(models.LLAMA), tmp_path)
        wait_ready(servers)
        return servers[0]

    try:
        wait_ready(servers)
        with indexer(events, tmp_path / "indexer.log") as heard:
            heard.register()
            yield servers[0], heard, restart
    finally:
        servers[0].stop()


def compare(heard: Indexer, asker: Asker, num_prompts: int) -> int:
    """Prompts of which more was known to be in the arena than in the pool, of those that were asked for."""
    num_in_arena = 0
    for _ in range(num_prompts):
        ids, rank = asker.draw()
        # The last token is computed, whatever is there.
        most = (len(ids) - 1) // PAGE * PAGE
        # Events come a moment after the answer: each rank has told them, and then they are heard.
        asker.wait_for_a_step()
        assert wait_until_still(partial(heard.believes, ids), timeout_s=60, still_s=2.0, poll_s=0.1)
        believed = heard.believes(ids)
        found = asker.ask(ids, rank)
        in_pool = believed["dp"].get(str(rank), 0)
        assert min(in_pool, most) == found["device"], (believed, found)
        # Each rank has a part of the arena, and this server reads all of them: it finds more, never less.
        assert min(believed["longest_matched"], most) <= found["all"], (believed, found)
        num_in_arena += min(believed["longest_matched"], most) > max([*believed["dp"].values(), 0])
    return num_in_arena


def test_dynamos_indexer_when_pages_come_go_are_flushed_and_the_server_starts_again_then_it_believes_what_is_there(
    served,
):
    server, heard, restart = served
    asker, told = Asker(server), ToldPages(heard.port)
    try:
        while told.num() < NUM_TOLD_PAGES:
            asker.ask(*asker.draw())
    finally:
        told.close()
    assert compare(heard, asker, 25) > 0, "of the arena it knows nothing"
    asker.flush()
    until(lambda: all(heard.believes(ids)["longest_matched"] == 0 for ids in asker.prompts))
    for _ in range(40):
        asker.ask(*asker.draw())
    compare(heard, asker, 10)
    # What Dynamo does when a worker has gone, and when it is back.
    heard.unregister()
    asker = Asker(restart())
    heard.register()
    for _ in range(40):
        asker.ask(*asker.draw())
    compare(heard, asker, 10)
