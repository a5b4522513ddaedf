# SPDX-License-Identifier: Apache-2.0
"""Two prefill servers, a decode server and a router: real engines, one store. One prefill server and the decode server
have two ranks each."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import zmq
from test.e2e.conftest import MODEL, until
from test.e2e.patience.patient import plugin
from test.e2e.test_tiers import damage

from banyan.cli.engine import EngineError
from banyan.cli.explain import decisions, sentences
from banyan.owner import read_secret
from banyan.transport.sealed import sealing
from banyan.transport.sealed.secret import Keys
from benchmark.engine import Engine
from benchmark.pd import num_answer_pages, num_found_pages
from benchmark.pd_servers import PAGE_TOKENS, SERVER_ARGS, Pair
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready, write_secret
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e

ANSWER_TOKENS = 40
CHUNK_TOKENS = 512
CHUNKS = ("--chunked-prefill-size", str(CHUNK_TOKENS))
"""So that long prompts are computed, and handed over, in several chunks."""

LATE_WRITE_S = 5
"""Instead of minutes: how long pages stay unused that a killed prefill server may still write into."""


@pytest.fixture(scope="module")
def pairs(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("pairs")
    page_server, secret_file = f"127.0.0.1:{free_port()}", write_secret(folder / "secret")
    secret = ("--banyan-secret-file", str(secret_file))
    pair = Pair(
        "pairs",
        "on",
        MODEL,
        folder / "logs",
        prefill_ranks=(2, 1),
        decode_ranks=2,
        store=folder / "store",
        prefill_args=(
            "--max-total-tokens",
            "6000",
            "--banyan-plan",
            "move",
            *secret,
            "--banyan-peers",
            page_server,
            *CHUNKS,
        ),
        decode_args=("--max-total-tokens", "6000", *secret, "--banyan-listen", page_server),
        kind=ForkedServer,
        env=(
            ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", str(LATE_WRITE_S)),
            *plugin(folder / "patience"),
        ),
    )
    with pair, pair.routed() as url:
        yield SimpleNamespace(
            pair=pair,
            url=url,
            router=Engine(url),
            store=folder / "store",
            page_server=page_server,
            secret=secret_file,
            living=list(pair.servers),
        )


def first_turn(pairs, ids):
    """A first turn whose answer has been written; the second turn's prompt but for its question."""
    pair = pairs.pair
    before = pair.total(pair.decode, "archived_pages")
    output = pairs.router.generate(ids, num_tokens=ANSWER_TOKENS)["output_ids"]
    num_pages = num_answer_pages(len(ids), ANSWER_TOKENS)
    until(lambda: pair.total(pair.decode, "archived_pages") >= before + num_pages)
    # A rank learns what others have stored by a thread of its own.
    until(
        lambda: known_records(pair) == {num_stored(pair)},
        told=lambda: (known_records(pair), num_stored(pair)),
    )
    return [*ids, *output], num_pages


def ids_of(answer) -> list[int]:
    return answer["output_ids"]


def expected(pairs, ids, *, num_tokens: int) -> list[int]:
    """What is to come out, computed where nobody else will find it."""
    return ids_of(pairs.router.generate(ids, num_tokens=num_tokens, cache_salt="expected"))


def refusal(server: Server) -> str:
    """Empty its caches; what it answers while it has something to do."""
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + "/flush_cache", method="POST"), timeout=60):
            return ""
    except urllib.error.HTTPError as refused:
        return refused.read().decode()


def leftovers(pair: Pair, server: Server) -> str | dict[str, int]:
    """What a server that was told to empty its caches has locked, is filling, has leased (what is leased goes into
    quarantine) or published."""
    names = ("num_locked_tokens", "num_quarantined_pages", "num_published_pages")
    arena = ("num_arena_pages", "num_arena_filling_frames")
    said = refusal(server)
    return said or {name: num for name in (*names, *arena) if (num := pair.total(server, name))}


def come_to_rest(pair: Pair, servers: Sequence[Server]) -> None:
    """Every server comes to rest, and can give up all that it holds. Its own check of its pool has found no hole."""
    for server in servers:
        # What one server still reads for the other lands behind a flush: it is content, and goes with the next one.
        left = partial(leftovers, pair, server)
        until(lambda left=left: not left(), told=lambda left=left, server=server: (server.spec.label, left()))


def load_of(server: Server, *names: str) -> int:
    with urllib.request.urlopen(server.url + "/v1/loads?include=core", timeout=60) as response:
        loads = json.loads(response.read())["loads"]
    return sum(load[name] for load in loads for name in names)


def num_requests(server: Server) -> int:
    return load_of(server, "num_running_reqs", "num_waiting_reqs")


def works_on(server: Server, num_tokens: int) -> bool:
    """Whether it is computing a prompt of so many tokens: health checks, which come in between, are short."""
    return load_of(server, "num_total_tokens") >= num_tokens


def num_retries(pairs) -> int:
    with urllib.request.urlopen(pairs.url + "/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("banyan_router_retries_total"))))


def test_next_turn_when_the_answer_was_generated_on_the_decode_server_then_prefill_finds_all_of_it(pairs, prompt):
    grown, num_pages = first_turn(pairs, prompt("dawn", 120))
    answer = pairs.router.generate([*grown, *prompt("dusk", 30)], num_tokens=4)
    # One more where SGLang had begun the next step before it saw that the answer had ended.
    assert num_found_pages(answer["meta_info"]["cached_tokens_details"]) >= num_pages > 0
    until(lambda: pairs.pair.total(pairs.pair.decode, "num_locked_tokens") == 0)


def test_conversation_when_it_goes_on_then_only_what_is_new_is_handed_over_and_its_answers_are_those_of_one_server(
    pairs, prompt, tmp_path
):
    pair, ids = pairs.pair, prompt("brook", 900)

    def total(name):
        return sum(pair.total(server, name) for server in pair.prefills)

    before, before_advanced = total("handed_over_pages"), total("advanced_pages")
    with drained(pairs, pair.prefills[0]):
        first = ids_of(pairs.router.generate(ids, num_tokens=8))
        grown = [*ids, *first, *prompt("ford", 30)]
        num_first, num_advanced = total("handed_over_pages") - before, total("advanced_pages") - before_advanced
        second = ids_of(pairs.router.generate(grown, num_tokens=8))
    # Layers of the first chunk, the larger one, have left before its forward's end, and with it nothing twice.
    assert num_advanced >= CHUNK_TOKENS // PAGE_TOKENS and num_first == -(-len(ids) // PAGE_TOKENS)
    assert total("handed_over_pages") - before - num_first <= 4
    spec = ServerSpec("single", 1, "off", (*SERVER_ARGS, "--max-total-tokens", "4000", *CHUNKS), cpu_env(dp=1))
    with ForkedServer(spec, MODEL, tmp_path) as single:
        wait_ready([single])
        assert [ids_of(Engine(single.url).generate(asked, num_tokens=8)) for asked in (ids, grown)] == [first, second]


def known_records(pair: Pair) -> set[int]:
    """How many pages in the store the ranks of the prefill servers know of. Those of a decode server do not ask."""
    return {state["store"]["num_records"] for server in pair.prefills for state in pair.states(server)}


def num_stored(pair: Pair) -> int:
    """How many pages the ranks of all servers have stored."""
    return sum(state["store"]["own_records"] for server in pair.servers for state in pair.states(server))


def num_remote_leases(pair: Pair) -> int:
    """Of the decode server's pages, for others."""
    return sum(state.get("page_server", {}).get("num_remote_leases", 0) for state in pair.states(pair.decode))


@contextmanager
def drained(pairs, server: Server) -> Iterator[None]:
    """Requests go elsewhere."""

    def tell(word: str) -> None:
        query = urllib.parse.urlencode({"server": server.url})
        urllib.request.urlopen(urllib.request.Request(f"{pairs.url}/router/{word}?{query}", method="POST")).close()

    tell("drain")
    try:
        yield
    finally:
        tell("resume")


def test_prompt_when_another_prefill_server_has_stored_it_then_both_sides_of_the_pair_read_a_part_of_it(pairs, prompt):
    pair, ids = pairs.pair, prompt("river", 1200)
    one, other = pair.prefills
    before, num_known = pair.total(one, "archived_pages"), max(known_records(pair))
    num_pages = len(ids) // PAGE_TOKENS
    with drained(pairs, other):
        right = ids_of(pairs.router.generate(ids, num_tokens=8))
    until(lambda: pair.total(one, "archived_pages") >= before + num_pages)
    until(lambda: pair.states(other)[0]["nodes"]["num_listening"] == 1)
    # A rank learns what others have stored by a thread of its own: who knows of half of it divides it in other ways.
    until(
        lambda: len(known_records(pair)) == 1 and min(known_records(pair)) >= num_known + num_pages,
        told=lambda: (num_known, known_records(pair)),
    )
    # It was handed the prompt, and would lend it from its arena without a read. What others have stored nobody finds
    # until he has heard of that flush: who empties his own caches waits for it.
    for server in (pair.decode, other):
        until(lambda server=server: not refusal(server))
    with drained(pairs, one):
        answer = pairs.router.generate(ids, num_tokens=8)
    assert ids_of(answer) == right
    # Its own name for the request is not that of the decode server, which answers.
    said = [line for decision in decisions(Engine(other.url), "all") for line in sentences(decision)]
    num_found = num_found_pages(answer["meta_info"]["cached_tokens_details"])
    assert num_found >= num_pages - 1, "\n".join([*said, str(pair.states(other)), other.log_tail()])
    assert f"  path: split at 576 tokens, behind them through {pairs.page_server}" in said, "\n".join(said)
    assert (pair.total(other, "remote_prefetches_sent"), pair.total(other, "remote_prefetches_failed")) == (1, 0)
    assert pair.total(pair.decode, "remote_prefetches") == 1 and pair.total(pair.decode, "read_pages") >= 36
    until(lambda: not num_remote_leases(pair))


def control_address(server: Server) -> str:
    """Where the first rank of a prefill server listens for decode servers."""
    bootstrap = server.spec.args[server.spec.args.index("--disaggregation-bootstrap-port") + 1]
    ranks = "&".join(f"{kind}_rank=0" for kind in ("prefill_dp", "prefill_cp", "target_tp", "target_pp"))
    with urllib.request.urlopen(f"http://127.0.0.1:{bootstrap}/route?{ranks}", timeout=60) as response:
        found = json.loads(response.read())
    return f"tcp://{found['rank_ip']}:{found['rank_port']}"


NOT_LET_IN = "one who does not know the secret of --banyan-secret-file is not let in"


def test_control_port_when_a_thousand_foreign_messages_come_then_those_of_strangers_are_not_heard_and_requests_go_on(
    pairs, prompt
):
    """Of one who knows the secret a thousand are heard, and dropped; of one who does not, none."""
    pair, strangers, insiders = pairs.pair, zmq.Context(), zmq.Context()
    sealing.speaks(insiders, Keys.of(read_secret(pairs.secret)))
    for server in pair.prefills:
        with strangers.socket(zmq.PUSH) as stranger, insiders.socket(zmq.PUSH) as insider:
            stranger.setsockopt(zmq.LINGER, 0)
            # Its messages stay with it.
            stranger.setsockopt(zmq.SNDHWM, 0)
            for socket in (stranger, insider):
                socket.connect(control_address(server))
            for number in range(1000):
                # A stranger whose handshake has failed has nobody left to send to.
                with contextlib.suppress(zmq.Again):
                    stranger.send_multipart([b"GET / HTTP/1.1", b"%d" % number], zmq.NOBLOCK)
                insider.send_multipart([b"GET / HTTP/1.1", b"%d" % number])
            until(lambda server=server: pair.total(server, "foreign_hand_over_messages") == 1000)
            until(lambda server=server: NOT_LET_IN in server.log_path.read_text(errors="replace"))
            time.sleep(1.0)
            assert pair.total(server, "foreign_hand_over_messages") == 1000, "strangers are not heard"
        others = [other for other in pair.prefills if other is not server]
        with drained(pairs, others[0]):
            assert len(ids_of(pairs.router.generate(prompt(f"noise-{server.port}", 60), num_tokens=2))) == 2
    insiders.term()
    strangers.term()


def test_room_when_a_client_that_passes_by_the_router_names_none_that_there_is_then_refused(pairs, prompt):
    body = json.dumps({"input_ids": prompt("past", 20), "bootstrap_host": "127.0.0.1", "bootstrap_room": -1})
    for server in pairs.living:
        asked = urllib.request.Request(server.url + "/generate", body.encode(), {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert refused.value.code == 400 and b"63 bits" in refused.value.read()


def test_request_when_its_page_is_damaged_on_the_way_then_its_answer_is_right_and_computed_whole(pairs, prompt):
    """Whether the damage is seen before the lease (the prompt is computed) or behind it (the router tries again)."""
    # Of two ranks the other one's pool might still have the prompt.
    with drained(pairs, pairs.pair.prefills[0]):
        grown, _ = first_turn(pairs, prompt("flood", 120))
        ids = [*grown, *prompt("ebb", 30)]
        right = expected(pairs, ids, num_tokens=4)
        damage(pairs.store)
        start_s = time.monotonic()
        answer = pairs.router.generate(ids, num_tokens=4)
    assert ids_of(answer) == right
    assert sum(pairs.pair.total(server, "read_failed_pages") for server in pairs.pair.prefills) > 0
    assert num_found_pages(answer["meta_info"]["cached_tokens_details"]) == 0, "computed whole"
    assert time.monotonic() - start_s < 120, "nobody has waited for upstream's 300 s"
    come_to_rest(pairs.pair, pairs.living)


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(2500, 8), (100, 1500)])
def test_client_when_it_leaves_before_or_within_its_answer_then_neither_server_keeps_anything(
    num_prompt, num_answer, pairs, prompt
):
    address = urlsplit(pairs.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    body = {
        "input_ids": prompt(f"leaves-{num_prompt}", num_prompt),
        "sampling_params": {"max_new_tokens": num_answer, "ignore_eos": True, "temperature": 0},
        "stream": True,
    }
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    if num_prompt < num_answer:
        assert connection.getresponse().readline().startswith(b"data:")
    else:
        until(lambda: any(works_on(server, num_prompt) for server in pairs.pair.prefills))
    connection.close()
    until(lambda: sum(num_requests(server) for server in pairs.living) == 0)
    come_to_rest(pairs.pair, pairs.living)


def router_says(pairs, path: str, *, method: str = "GET"):
    with urllib.request.urlopen(urllib.request.Request(pairs.url + path, method=method), timeout=60) as answer:
        return json.load(answer)


def test_requests_when_their_prefill_server_is_killed_then_another_answers_all_but_the_last_and_nothing_is_left(
    pairs, prompt
):
    ids = prompt("storm", 2500)
    right = expected(pairs, ids, num_tokens=4)
    until(lambda: not any(works_on(server, len(ids)) for server in pairs.pair.prefills))
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(pairs.router.generate, ids, num_tokens=4)
        at_work = []
        until(lambda: at_work.extend(one for one in pairs.pair.prefills if works_on(one, len(ids))) or at_work)
        (victim,) = at_work
        # It is killed before it has ended its work, however long the router takes to be told.
        victim.asleep()
        (other,) = (server for server in pairs.pair.prefills if server is not victim)
        # So that the next request, the last that the victim is sent, goes there too.
        router_says(pairs, f"/router/drain?server={other.url}", method="POST")
        last = pool.submit(pairs.router.generate, prompt("last", 2500), num_tokens=4)
        until(lambda: any(one["num_in_flight"] == 2 for one in router_says(pairs, "/router/servers")))
        router_says(pairs, f"/router/resume?server={other.url}", method="POST")
        victim.kill()
        start_s = time.monotonic()
        assert ids_of(asked.result()) == right
        assert time.monotonic() - start_s < 120, "not upstream's 300 s"
        with pytest.raises(EngineError, match="server_lost"):
            last.result()
    assert num_retries(pairs) > 0
    pairs.living.remove(victim)
    # The other one goes on.
    assert len(ids_of(pairs.router.generate(prompt("calm", 60), num_tokens=2))) == 2
    come_to_rest(pairs.pair, pairs.living)
