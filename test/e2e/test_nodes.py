# SPDX-License-Identifier: Apache-2.0
"""Two real servers, one of which takes prefixes from the other one's arena: same tokens, also when that is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest
from test.e2e.conftest import ARGS, MODEL, Client

from banyan.cli.engine import Engine
from banyan.cli.explain import decisions, sentences
from banyan.core import Address
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

PAGE = 16
PROMPT_TOKENS = 1200


def until(condition: Callable[[], bool], *, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def nodes(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("nodes")
    secret = folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    door = Address("127.0.0.1", free_port())
    common = (*ARGS, "--banyan-host-gb", "0.5", "--banyan-secret-file", str(secret))
    strict = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")

    def start(label: str, core: int, *flags: str) -> Server:
        spec = ServerSpec(label, 1, "on", (*common, *flags), (*cpu_env(dp=1, first_core=core), strict))
        return ForkedServer(spec, MODEL, folder)

    lender = start("lender", 0, "--banyan-listen", str(door))
    with lender, start("borrower", 1, "--banyan-peers", str(door)) as borrower:
        wait_ready([lender, borrower])
        yield SimpleNamespace(lender=Client(lender), borrower=Client(borrower), door=door)


def lent(nodes, ids):
    """The lender's answer, once the prompt lies in its arena and the borrower hears the lender."""
    output, _ = nodes.lender.generate(ids)
    seen = [nodes.lender.total("backed_up_pages")]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        assert len(seen) < 300, f"it does not come to rest: {seen}"
        time.sleep(0.2)
        seen.append(nodes.lender.total("backed_up_pages"))
    until(lambda: nodes.borrower.ranks()[0]["nodes"]["num_listening"] == 1)
    return output


def test_prefix_when_another_node_holds_it_then_it_comes_from_there_with_the_same_tokens(nodes, prompt):
    ids = prompt("abroad", PROMPT_TOKENS)
    expected = lent(nodes, ids)
    output, meta = nodes.borrower.generate(ids)
    details = meta["cached_tokens_details"]
    assert details["remote"] >= PROMPT_TOKENS - 2 * PAGE, details
    assert output == expected
    engine = Engine(nodes.borrower.server.url)
    (decision,) = decisions(engine, meta["id"])
    assert any(f"at remote {nodes.door}" in line for line in sentences(decision))
    _, meta = nodes.borrower.generate(ids)
    assert "remote" not in meta["cached_tokens_details"], "it has its own now"
    state = nodes.lender.ranks()[0]
    assert state["door"]["num_loans"] == 0 and state["lent_bytes"] == nodes.borrower.total("pull_bytes") > 0


def listening(server: Server) -> set[int]:
    """The TCP ports on which any of its processes listens."""
    processes = [process for process in psutil.process_iter() if session_of(process.pid) == server.pid]
    connections = [found for process in processes for found in process.net_connections(kind="tcp")]
    return {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_ports_when_only_one_server_was_told_to_listen_then_the_other_has_two_less(nodes):
    lender, borrower = listening(nodes.lender.server), listening(nodes.borrower.server)
    doors = {nodes.door.port, nodes.door.port + 1}
    assert doors <= lender and not doors & borrower
    assert len(lender) == len(borrower) + len(doors)


def test_conversation_when_the_other_node_is_killed_then_it_goes_on_with_the_same_tokens(nodes, prompt):
    turns = [prompt(f"turn-{turn}", 300) for turn in range(3)]
    first = [*turns[0], *lent(nodes, turns[0])]
    second = [*first, *turns[1]]
    expected = lent(nodes, second)
    assert nodes.borrower.generate(second)[0] == expected
    third = [*second, *expected, *turns[2]]
    expected = lent(nodes, third)
    nodes.lender.server.kill()
    output, meta = nodes.borrower.generate(third)
    assert output == expected and "remote" not in meta["cached_tokens_details"]
