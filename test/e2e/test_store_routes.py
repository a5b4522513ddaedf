# SPDX-License-Identifier: Apache-2.0
"""Two real servers, each with a store of its own, and a router in front of them: prompts that only a store still has go
to the server whose store it is, also after that has started again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from test.e2e.conftest import ARGS, MODEL, Client, until
from test.e2e.test_nodes import PAGE

from benchmark.router_failover import router
from benchmark.servers import ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]

PROMPT_TOKENS = 400
LEAST_TOKENS = PROMPT_TOKENS - 2 * PAGE
"""Of a prompt, that its store brings back."""

NAMES = [f"kept-{number}" for number in range(4)]
PUSHING = [f"pushing-{number}" for number in range(10)]
# Room for 94 pages in the pool and for 139 in the arena; the prompts have 100, and what pushes them out 250.
SMALL = ("--max-total-tokens", "1504", "--banyan-host-gb", "0.01")
ROUTER_ASKS_S = 0.25
# What the router has heard of a load may be old: it is not to go by that.
WHEREVER = ("--hot-rank-factor", "inf")
STORE = ("--banyan-store-gb", "1", "--banyan-store-admit", "first")


@pytest.fixture(scope="module")
def servers(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("store-routes")
    strict = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")

    def spec_of(label: str, core: int) -> ServerSpec:
        events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "bind": True}
        events["replay_endpoint"] = f"tcp://127.0.0.1:{free_port()}"
        flags = (*ARGS, *SMALL, *STORE, "--banyan-store", str(folder / label), "--kv-events-config", json.dumps(events))
        return ServerSpec(label, 1, "on", flags, (*cpu_env(dp=1, first_core=core), strict))

    specs = [spec_of("holder", 0), spec_of("other", 1)]
    started = [ForkedServer(spec, MODEL, folder) for spec in specs]

    def restart() -> None:
        started[0].stop()
        started[0] = ForkedServer(specs[0], MODEL, folder, port=started[0].port)
        wait_ready(started[:1])

    try:
        wait_ready(started)
        log = folder / "router.log"
        with router([server.url for server in started], "lmetric", log, WHEREVER) as url:
            yield SimpleNamespace(
                urls=[server.url for server in started],
                holder=Client(started[0]),
                itself=Client(SimpleNamespace(url=url)),
                restart=restart,
            )
    finally:
        for server in started:
            server.stop()


def states(servers):
    """What the router knows of each server."""
    return {state["server"]: state for state in json.loads(servers.itself.get("/router/servers"))}


def num_stored(servers):
    """Pages that it knows in the holder's store."""
    state = states(servers)[servers.urls[0]]
    return sum(state["known_stored_blocks"]) if state["state"] == "up" else 0


def is_idle(client):
    (load,) = json.loads(client.get("/v1/loads?include=core"))["loads"]
    return load["num_total_tokens"] == 0


def returned(servers, ids):
    """The answer to a prompt that comes back by the router while nobody is busy; how many of its tokens the holder had
    to read from its store."""
    until(lambda: is_idle(servers.holder))
    time.sleep(2 * ROUTER_ASKS_S)
    before = servers.holder.total("read_pages")
    output, meta = servers.itself.generate(ids)
    details = meta["cached_tokens_details"] or {}
    # What has been read when its prompt's turn comes is in the arena by then.
    num_tokens = details.get("storage", 0) + details.get("host", 0)
    until(lambda: servers.holder.total("read_pages") >= before + LEAST_TOKENS // PAGE, told=lambda: details)
    return output, num_tokens


def test_prompts_when_only_a_servers_store_still_has_them_then_they_go_there_also_after_it_has_started_again(
    servers, prompt
):
    until(lambda: all(state["state"] == "up" for state in states(servers).values()))
    prompts = [prompt(name, PROMPT_TOKENS) for name in NAMES]
    expected = []
    for ids in prompts:
        before = servers.holder.total("archived_pages")
        expected.append(servers.holder.generate(ids)[0])
        until(lambda before=before: servers.holder.total("archived_pages") >= before + PROMPT_TOKENS // PAGE)
    for name in PUSHING:
        before = servers.holder.total("archived_pages")
        servers.holder.generate(prompt(name, PROMPT_TOKENS), num_tokens=1)
        # What is being written holds its place in the arena, and what finds none there is not stored.
        until(lambda before=before: servers.holder.total("archived_pages") >= before + PROMPT_TOKENS // PAGE)
    until(lambda: num_stored(servers) >= (len(NAMES) + len(PUSHING)) * (PROMPT_TOKENS // PAGE))
    for ids, output in zip(prompts, expected, strict=True):
        said, num_tokens = returned(servers, ids)
        assert said == output and num_tokens >= LEAST_TOKENS
    servers.restart()
    until(lambda: num_stored(servers) >= (len(NAMES) + len(PUSHING)) * (PROMPT_TOKENS // PAGE))
    for ids, output in zip(prompts, expected, strict=True):
        said, num_tokens = returned(servers, ids)
        assert said == output and num_tokens >= LEAST_TOKENS
    stores = [state["store"] for state in states(servers).values()]
    assert all(stores) and len(set(stores)) == 2
