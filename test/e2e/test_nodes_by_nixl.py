# SPDX-License-Identifier: Apache-2.0
"""Two real servers, one of which takes prefixes from the other one's arena by NIXL: same tokens, also when a NIXL
process is killed or stands still. UCX goes over TCP, as between nodes without RDMA."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
from test.e2e import test_nodes
from test.e2e.conftest import ARGS, MODEL, Client, until
from test.e2e.test_nodes import PAGE, PROMPT_TOKENS, session_of

from banyan.core import Address
from benchmark.remote_link import NIXL_ENV
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
pytest.importorskip("nixl")

PROGRAM = "banyan.transport.nixl.program"


@pytest.fixture(scope="module")
def nodes(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("nodes")
    secret = folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    page_server = Address("127.0.0.1", free_port())
    common = (*ARGS, "--banyan-host-gb", "0.5", "--banyan-secret-file", str(secret), "--banyan-carrier", "nixl")
    env = (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"), *NIXL_ENV.items())

    def start(label: str, core: int, *flags: str) -> Server:
        spec = ServerSpec(label, 1, "on", (*common, *flags), (*cpu_env(dp=1, first_core=core), *env))
        return ForkedServer(spec, MODEL, folder)

    lender = start("lender", 0, "--banyan-listen", str(page_server))
    with lender, start("borrower", 1, "--banyan-peers", str(page_server)) as borrower:
        wait_ready([lender, borrower])
        found = SimpleNamespace(lender=Client(lender), borrower=Client(borrower), logs=folder)
        until(lambda: is_up(found))
        yield found


def is_up(nodes) -> bool:
    """Whether both NIXL processes are."""
    return nodes.lender.ranks()[0]["page_server"]["has_nixl"] and told(nodes)["num_nixl_ready"] == 1


def told(nodes):
    return nodes.borrower.ranks()[0]["nodes"]


def lent(nodes, ids):
    return test_nodes.lent(nodes, ids, num_listening=1)


def nixl_of(client: Client) -> psutil.Process:
    """A server's NIXL process."""
    mine = [one for one in psutil.process_iter() if session_of(one.pid) == client.server.pid]
    (found,) = [one for one in mine if PROGRAM in one.cmdline()]
    return found


def test_prefix_when_both_servers_have_nixl_then_it_comes_by_that_with_the_same_tokens(nodes, prompt):
    ids = prompt("read", PROMPT_TOKENS)
    expected = lent(nodes, ids)
    output, meta = nodes.borrower.generate(ids)
    assert meta["cached_tokens_details"]["remote"] >= PROMPT_TOKENS - 2 * PAGE
    assert output == expected
    assert told(nodes)["num_by_nixl"] == 1 and told(nodes)["num_lost_pulls"] == 0
    page_server = nodes.lender.ranks()[0]["page_server"]
    assert page_server["num_lent_by_nixl"] == 1 and nodes.lender.ranks()[0]["lent_bytes"] == 0, "nothing over TCP"
    until(lambda: nodes.lender.ranks()[0]["page_server"]["num_remote_leases"] == 0)
    assert "lends by NIXL (UCX)" in (nodes.logs / "lender.log").read_text()


@pytest.mark.parametrize("whose", ["lender", "borrower"])
def test_prefix_when_a_nixl_process_is_killed_then_the_tokens_are_right_and_nixl_comes_back(nodes, prompt, whose):
    until(lambda: is_up(nodes))
    nixl_of(getattr(nodes, whose)).kill()
    for number in range(2):
        ids = prompt(f"killed-{whose}-{number}", PROMPT_TOKENS)
        expected = lent(nodes, ids)
        assert nodes.borrower.generate(ids)[0] == expected
    until(lambda: is_up(nodes))
    before = told(nodes)["num_by_nixl"]
    ids = prompt(f"after-{whose}", PROMPT_TOKENS)
    expected = lent(nodes, ids)
    assert nodes.borrower.generate(ids)[0] == expected
    assert told(nodes)["num_by_nixl"] == before + 1


def test_prefix_when_what_lends_stands_still_then_it_is_computed_and_what_comes_later_harms_nobody(nodes, prompt):
    until(lambda: is_up(nodes))
    ids = prompt("stopped", PROMPT_TOKENS)
    expected = lent(nodes, ids)
    own, lost = nixl_of(nodes.lender), told(nodes)["num_lost_pulls"]
    own.suspend()
    try:
        assert nodes.borrower.generate(ids)[0] == expected
        assert told(nodes)["num_lost_pulls"] == lost + 1
    finally:
        own.resume()
    until(lambda: is_up(nodes))
    for number in range(2):
        ids = prompt(f"woken-{number}", PROMPT_TOKENS)
        expected = lent(nodes, ids)
        assert nodes.borrower.generate(ids)[0] == expected
