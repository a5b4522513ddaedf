# SPDX-License-Identifier: Apache-2.0
"""Two real servers, one of which takes prefixes from the other one's arena: same tokens, also when that is killed. A
router in front of them says whose arena has a prompt."""

from __future__ import annotations

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
from test.e2e.conftest import ARGS, MODEL, Client, until
from test.e2e.patience.patient import plugin

from banyan.cli.explain import decisions, sentences
from banyan.core import Address
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.wire import Ask
from banyan.owner import read_secret
from banyan.routing.headers import SOURCE_HEADER
from banyan.transport.sealed.secret import Keys
from benchmark.alternatives.kept import wait_until_still
from benchmark.engine import Engine
from benchmark.router_failover import router
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

PAGE = 16
PROMPT_TOKENS = 1200


class Witness(PageServer):
    """The page server of a third node, which has nothing. ``num_asked``: for how many prompts it was asked."""

    num_asked = 0

    def _answer_to(self, sender, message):
        self.num_asked += isinstance(message, Ask) and bool(message.keys)
        return super()._answer_to(sender, message)


@pytest.fixture(scope="module")
def nodes(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("nodes")
    secret = folder / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    page_server, third = (Address("127.0.0.1", free_port()) for _ in range(2))
    common = (*ARGS, "--banyan-host-gb", "0.5", "--banyan-secret-file", str(secret))
    env = (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"), *plugin(folder / "patience"))

    def start(label: str, core: int, *flags: str) -> Server:
        events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "bind": True}
        events["replay_endpoint"] = f"tcp://127.0.0.1:{free_port()}"
        flags = (*common, *flags, "--kv-events-config", json.dumps(events))
        spec = ServerSpec(label, 1, "on", flags, (*cpu_env(dp=1, first_core=core), *env))
        return ForkedServer(spec, MODEL, folder)

    lender = start("lender", 0, "--banyan-listen", str(page_server))
    witness = Witness(third, Keys.of(read_secret(secret)), max_pages=1, num_layers=1)
    with lender, start("borrower", 1, "--banyan-peers", f"{third},{page_server}") as borrower:
        wait_ready([lender, borrower])
        yield SimpleNamespace(
            lender=Client(lender), borrower=Client(borrower), page_server=page_server, witness=witness, logs=folder
        )
    witness.close()


def lent(nodes, ids, num_listening=2):
    """The lender's answer, once the prompt lies in its arena and the borrower hears the lender."""
    before = nodes.lender.total("backed_up_pages")
    output, meta = nodes.lender.generate(ids)
    num_new = len(ids) // PAGE - meta["cached_tokens"] // PAGE
    until(lambda: nodes.lender.total("backed_up_pages") >= before + num_new)
    # What it has generated follows.
    assert wait_until_still(lambda: nodes.lender.total("backed_up_pages"), timeout_s=60), "it does not come to rest"
    until(lambda: nodes.borrower.ranks()[0]["nodes"]["num_listening"] == num_listening)
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
    assert any(f"at remote {nodes.page_server}" in line for line in sentences(decision))
    _, meta = nodes.borrower.generate(ids)
    assert "remote" not in meta["cached_tokens_details"], "it has its own now"
    until(lambda: nodes.lender.ranks()[0]["page_server"]["num_remote_leases"] == 0)
    # The lender counts what it has sent when that is on its way already.
    until(lambda: nodes.lender.ranks()[0]["lent_bytes"] == nodes.borrower.total("pull_bytes") > 0)


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
    page_servers = {nodes.page_server.port, nodes.page_server.port + 1}
    assert page_servers <= lender and not page_servers & borrower
    assert len(lender) == len(borrower) + len(page_servers)


def asked(nodes, url, ids, source):
    """The answer to a prompt whose client names a source; how many questions it took, how many to one node alone, and
    how many to the third node."""

    def counts():
        borrower = nodes.borrower
        return borrower.total("questions"), borrower.total("questions_directed"), nodes.witness.num_asked

    before = counts()
    client = Client(SimpleNamespace(url=url))
    answer = client.post("/generate", client.body(ids), headers={SOURCE_HEADER: source})
    return answer, tuple(after - earlier for after, earlier in zip(counts(), before, strict=True))


def test_prompt_when_it_was_computed_at_one_server_then_the_router_has_the_other_ask_there_and_nowhere_else(
    nodes, prompt
):
    ids, lender, borrower = prompt("guided", PROMPT_TOKENS), nodes.lender.server.url, nodes.borrower.server.url
    with router([lender, borrower], "lmetric", nodes.logs / "router.log") as url:
        itself = Client(SimpleNamespace(url=url))

        def states():
            return {state["server"]: state for state in json.loads(itself.get("/router/servers"))}

        def tell(word, server):
            path = f"{url}/router/{word}?{urllib.parse.urlencode({'server': server})}"
            urllib.request.urlopen(urllib.request.Request(path, method="POST")).close()

        def num_lendable():
            return states()[lender]["known_arena_blocks"][0]

        until(lambda: all(state["state"] == "up" for state in states().values()))
        # What the first tests have brought there is told again to who comes late.
        until(lambda: num_lendable() == nodes.lender.total("num_arena_pages"))
        before = num_lendable()
        expected = lent(nodes, ids)
        until(lambda: num_lendable() >= before + PROMPT_TOKENS // PAGE)
        tell("drain", lender)
        answer, counts = asked(nodes, url, ids, str(nodes.witness.address))
        assert answer["output_ids"] == expected and counts == (1, 1, 0)
        assert answer["meta_info"]["cached_tokens_details"]["remote"] >= PROMPT_TOKENS - 2 * PAGE
        assert f'sources_total{{server="{borrower}",source="{nodes.page_server}"}} 1.0' in itself.get("/metrics")


def test_prompt_when_a_client_names_a_page_server_of_nobodys_then_all_nodes_are_asked_as_without_it(nodes, prompt):
    ids, foreign = prompt("misled", PROMPT_TOKENS), Address("127.0.0.1", free_port())
    expected = lent(nodes, ids)
    answer, counts = asked(nodes, nodes.borrower.server.url, ids, str(foreign))
    assert answer["output_ids"] == expected and counts == (1, 0, 1)
    assert answer["meta_info"]["cached_tokens_details"]["remote"] >= PROMPT_TOKENS - 2 * PAGE


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
