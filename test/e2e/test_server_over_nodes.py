# SPDX-License-Identifier: Apache-2.0
"""Servers over two nodes (``--nnodes 2``), alone and in a pair: two machines, as far as network and shared memory
tell."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from test.e2e.conftest import Client, until

from banyan._native import store_survey
from banyan.layout import cacheable_tokens
from banyan.routing import Reason
from benchmark import two_nodes
from benchmark.alternatives.kept import wait_until_still
from benchmark.modes import asking, models
from benchmark.servers import ServerSpec, cpu_env, free_port, wait_ready
from benchmark.two_nodes import ADDRESSES, TwoNodes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.further,
    pytest.mark.skipif(not two_nodes.is_possible(), reason="networks of one's own take the right to make them"),
]

PAGE = 16
FLAGS = ("--device", "cpu", "--context-length", "2048", "--sleep-on-idle", "--banyan-plan", "move")
ENV = (
    ("SGLANG_NCCL_SO_PATH", "/nonexistent"),
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),
)
SETTLES_S = 60.0


class OverNodes(Client):
    """Asks the server; what it does must be done on the first node."""

    def ask(self, ids: list[int], rank: int | None = None) -> tuple[list[int], dict[str, int]]:
        """``(tokens, cached tokens by where they came from)``."""
        body = {"input_ids": ids, "sampling_params": asking.GREEDY, "routed_dp_rank": rank}
        answer = self.post("/generate", body)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return answer["output_ids"], {source: details.get(source, 0) for source in asking.SOURCES}

    def is_idle(self) -> bool:
        """As far as the dispatcher has heard."""
        loads = json.loads(self.get("/v1/loads?include=core"))["loads"]
        return not any(load["num_total_tokens"] for load in loads)


class OnFirstNode:
    """Runs things there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.nodes: TwoNodes = self(TwoNodes)

    def __call__(self, act: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return self._thread.submit(act, *args, **named).result()

    def close(self) -> None:
        self.nodes.close()
        self._thread.shutdown()


@contextmanager
def serving(there: OnFirstNode, specs: list[ServerSpec], model: Path, folder: Path) -> Iterator[OverNodes]:
    servers = there(there.nodes.serve, specs, model, folder)
    try:
        there(wait_ready, servers[:1])
        yield OverNodes(servers[0])
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def there(alone) -> Iterator[OnFirstNode]:
    made = OnFirstNode()
    yield made
    made.close()


@pytest.fixture(scope="module")
def asked() -> Iterator[list[int]]:
    return iter(asking.prompts(32))


def whole_pages(ids: list[int]) -> int:
    return cacheable_tokens(len(ids), PAGE)


@pytest.fixture(scope="module")
def ranks(there, tmp_path_factory) -> Iterator[OverNodes]:
    """Four ranks in step, two on each node."""
    folder = tmp_path_factory.mktemp("ranks")
    step = ("--tp", "4", "--attn-dp-size", "4", "--max-total-tokens", "8000", "--banyan-host-gb", "0.25")
    spec = ServerSpec("ranks", 1, "on", (*FLAGS, *step), (*cpu_env(dp=2, first_core=0, num_cores=2), *ENV))
    specs = [spec, spec]
    with serving(there, specs, models.ensure(models.MOE), folder) as server:
        yield server


def test_prefix_when_a_rank_of_the_node_has_it_then_it_comes_from_there_and_from_no_other_node(there, ranks, asked):
    ids = next(asked)
    computed, cached = there(ranks.ask, ids, 0)
    assert not any(cached.values())
    fetched, cached = there(ranks.ask, ids, 1)
    assert fetched == computed and cached["peer"] == whole_pages(ids)
    abroad, cached = there(ranks.ask, ids, 2)
    assert abroad == computed and not any(cached.values())
    beside, cached = there(ranks.ask, ids, 3)
    assert beside == computed and cached["peer"] == whole_pages(ids)


def test_rank_when_it_is_on_another_node_then_it_believes_the_dispatcher(there, ranks, asked):
    for ids in [next(asked) for _ in range(10)]:
        first, _ = there(ranks.ask, ids)
        # Until the dispatcher has heard that it is idle: it goes by loads, too.
        time.sleep(1.0)
        until(lambda: there(ranks.is_idle))
        again, cached = there(ranks.ask, ids)
        assert again == first and sum(cached.values()) == whole_pages(ids), "it went to a rank that has nothing of it"
    states = there(ranks.ranks)
    by_policy = [sum(states[rank][f"placed_{reason}"] for reason in Reason) for rank in range(4)]
    assert all((sum(by_policy[:2]), sum(by_policy[2:]))), f"a node has got none: {by_policy}"
    assert all(state["num_ranks"] == state["num_live_ranks"] == 2 for state in states.values())


def test_loads_when_ranks_are_on_two_nodes_then_the_dispatcher_hears_all_of_them(there, ranks, asked):
    ids, began_s = next(asked), time.time()
    for rank in range(4):
        there(ranks.ask, ids, rank)
    # What the dispatcher has read: nobody else takes what comes over the network.
    deadline_s = time.monotonic() + SETTLES_S
    while sum(load["timestamp"] > began_s for load in json.loads(there(ranks.get, "/v1/loads"))["loads"]) < 4:
        assert time.monotonic() < deadline_s, there(ranks.get, "/v1/loads")
        time.sleep(0.5)


def test_flush_when_ranks_are_on_two_nodes_then_nobody_finds_anything(there, ranks, asked):
    ids = next(asked)
    for rank in (0, 2):
        there(ranks.ask, ids, rank)
    there(ranks.post, "/flush_cache?timeout=30", {})
    for rank in (3, 1):
        _, cached = there(ranks.ask, ids, rank)
        assert cached["device"] == 0 and cached["peer"] == 0, cached
        there(ranks.post, "/flush_cache?timeout=30", {})


def one_rank(there: OnFirstNode, shape: models.Shape, folder: Path, *flags: str) -> Any:
    """One rank of two shards, one on each node; the nodes' stores are in ``folder`` and stay."""
    size = ("--tp", "2", "--max-total-tokens", "1200", "--banyan-host-gb", "0.1")
    specs = [
        ServerSpec(
            "one-rank",
            1,
            "on",
            (*FLAGS, *size, *(flag.replace("NODE", str(node)) for flag in flags)),
            (*cpu_env(dp=1, first_core=node), *ENV),
        )
        for node in range(2)
    ]
    return serving(there, specs, models.ensure(shape), folder)


def test_rank_when_it_lies_on_two_nodes_then_what_leaves_its_pools_comes_back_from_each_nodes_dram(
    there, tmp_path, asked
):
    # Of MLA both shards have all of a page: each node keeps one.
    prompts = [next(asked) for _ in range(5)]
    with one_rank(there, models.MLA, tmp_path) as server:
        computed, num_pages = [], 0
        for ids in prompts:
            computed.append(there(server.ask, ids))
            num_pages += whole_pages(ids) // PAGE
            # What has left the pool and is not yet copied down is nowhere.
            until(lambda num_pages=num_pages: there(server.total, "backed_up_pages") >= num_pages)
        # Of what a node has copied down, only the first one's rank tells: the other one has as long.
        assert wait_until_still(lambda: there(server.total, "backed_up_pages"), timeout_s=60)
        again = [there(server.ask, ids) for ids in prompts]
    assert not any(sum(cached.values()) for _, cached in computed)
    assert [said for said, _ in again] == [said for said, _ in computed]
    assert sum(cached["host"] for _, cached in again) > 0
    assert all(sum(cached.values()) == whole_pages(ids) for (_, cached), ids in zip(again, prompts, strict=True))


def test_rank_when_a_server_over_two_nodes_is_started_again_then_each_nodes_store_has_its_part(there, tmp_path, asked):
    prompts = [next(asked) for _ in range(3)]
    store = ("--banyan-store", str(tmp_path / "storeNODE"), "--banyan-store-admit", "first", "--banyan-store-gb", "0.5")
    with one_rank(there, models.LLAMA, tmp_path, *store) as server:
        computed = [there(server.ask, ids) for ids in prompts]
        num_pages = sum(whole_pages(ids) for ids in prompts) // PAGE
        # Of what a node has stored, only the first one's ranks tell.
        stores = [str(tmp_path / f"store{node}") for node in range(2)]
        until(lambda: all(store_survey([store])["num_records"] >= num_pages for store in stores))
    with one_rank(there, models.LLAMA, tmp_path, *store) as server:
        restarted = [there(server.ask, ids) for ids in prompts]
    assert [said for said, _ in restarted] == [said for said, _ in computed]
    # What has been read when its prompt's turn comes is in the arena by then.
    found = [cached["storage"] + cached["host"] for _, cached in restarted]
    assert found == [whole_pages(ids) for ids in prompts], restarted


ANSWER_TOKENS = 40
STEP = (
    *("--tp", "2", "--attn-dp-size", "2", "--max-total-tokens", "6000", "--banyan-host-gb", "0.25"),
    # Else SGLang's decode servers exchange logits in a way that gloo does not know.
    "--enable-dp-lm-head",
    # KV that was generated rounds in another way than KV that is computed with a prompt; so that no token shows it.
    *("--dtype", "float32"),
)
# The ranks on the second node say on the first where they listen.
REACHED = ("--host", "0.0.0.0")
HAND_OVERS = (("UCX_MODULES", "^ib"), ("UCX_TLS", "tcp"), ("MC_FORCE_TCP", "1"))


class PairOverNodes:
    """A prefill and a decode server, either of two ranks in step, one on each node. Asks without a router; what it does
    must be done on the first node."""

    def __init__(self, prefill: OverNodes, decode: OverNodes, bootstrap_port: int) -> None:
        self.prefill, self.decode, self._port = prefill, decode, bootstrap_port
        self._rooms = itertools.count(1)

    def ask(self, ids: list[int], ranks: tuple[int, int], **more: Any) -> tuple[list[int], int]:
        """What the decode server's rank, the second of ``ranks``, says to a prompt that the first computes, and how
        many of its tokens that found."""
        meeting = {"bootstrap_host": ADDRESSES[0], "bootstrap_port": self._port, "bootstrap_room": next(self._rooms)}
        sampling = {**asking.GREEDY, "max_new_tokens": ANSWER_TOKENS}
        body = {"input_ids": ids, "sampling_params": sampling, **meeting, **more}
        # Its threads are on this thread's node.
        with ThreadPoolExecutor(2) as both:
            halves = [
                both.submit(server.post, "/generate", {**body, "routed_dp_rank": rank})
                for server, rank in zip((self.prefill, self.decode), ranks, strict=True)
            ]
            computed, answer = (half.result() for half in halves)
        return answer["output_ids"], computed["meta_info"]["cached_tokens"]

    def known_records(self) -> dict[int, int]:
        """How many pages in the store each of the prefill server's ranks knows of. Those of a decode server do not
        ask."""
        return {rank: state["store"]["num_records"] for rank, state in self.prefill.ranks().items()}

    def num_stored(self) -> int:
        """How many pages the ranks of both servers have stored."""
        states = [state for server in (self.prefill, self.decode) for state in server.ranks().values()]
        return sum(state["store"]["own_records"] for state in states)


@contextmanager
def pair_over_nodes(there: OnFirstNode, engine: str, folder: Path) -> Iterator[PairOverNodes]:
    bootstrap_port = there(free_port)
    store = ("--banyan-store", str(folder / "store"), "--banyan-store-gb", "1")
    common = (*FLAGS, *STEP, *REACHED, *store, "--disaggregation-transfer-backend", engine)
    retracted = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    modes = {
        "prefill": ("--disaggregation-bootstrap-port", str(bootstrap_port)),
        "decode": retracted,
    }
    with ExitStack() as stack:
        servers = []
        for core, (mode, own) in enumerate(modes.items()):
            env = (*cpu_env(dp=1, first_core=core), *ENV, *HAND_OVERS)
            spec = ServerSpec(mode, 1, "on", (*common, "--disaggregation-mode", mode, *own), env)
            serving_both = serving(there, [spec, spec], models.ensure(models.MOE), folder)
            servers.append(stack.enter_context(serving_both))
        yield PairOverNodes(*servers, bootstrap_port)


# Each engine takes minutes. NIXL is what the other tests of pairs use.
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("engine", ["mooncake"])
def test_next_turn_when_both_servers_of_a_pair_lie_on_two_nodes_then_each_prefill_rank_finds_the_answer(
    engine, there, tmp_path, asked
):
    with pair_over_nodes(there, engine, tmp_path) as pair:
        # The prefill server's rank, and the decode server's: on one node, and on two.
        turns = {ranks: next(asked) for ranks in ((0, 0), (1, 1), (0, 1), (1, 0))}
        num_answer_pages = 0
        for ranks, ids in turns.items():
            said, _ = there(pair.ask, ids, ranks)
            turns[ranks] = [*ids, *said]
            # Without the last token of the answer, which no page holds yet.
            num_answer_pages += (len(turns[ranks]) - 1) // PAGE - len(ids) // PAGE
        until(lambda: there(pair.decode.total, "archived_pages") >= num_answer_pages)
        until(lambda: there(pair.num_stored) >= sum((len(turn) - 1) // PAGE for turn in turns.values()))
        num_stored = there(pair.num_stored)
        # For what another node has stored a rank looks only after somebody has looked something up.
        own_pages = {}
        for rank in (0, 1):
            there(pair.ask, ids := next(asked), (rank, rank))
            own_pages[rank] = len(ids) // PAGE
        until(
            lambda: all(known >= num_stored + own_pages[rank] for rank, known in there(pair.known_records).items()),
            told=lambda: (there(pair.known_records), num_stored, own_pages),
        )
        for ranks, turn in turns.items():
            again, found = there(pair.ask, [*turn, *turn[:30]], ranks)
            assert found >= (len(turn) - 1) // PAGE * PAGE, ranks
            right, computed = there(pair.ask, [*turn, *turn[:30]], ranks, cache_salt="expected")
            assert again == right and computed == 0, ranks
