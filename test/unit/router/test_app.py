# SPDX-License-Identifier: Apache-2.0
"""What a client sees of a router whose servers are well."""

from __future__ import annotations

import asyncio
import json
import operator
import time
from functools import partial

import pytest
import zmq
from test.unit.router.fake_server import BLOCK_TOKENS, FakeServer, running, until

from banyan.core import MAX_RANKS
from banyan.router import subscription, tokens
from banyan.router.blocks import ARENA, STORE, block_ids, pack
from banyan.router.events import AllBlocksCleared, BlockRemoved, BlockStored
from banyan.router.health import State
from banyan.routing.headers import READ_HEADER, SOURCE_HEADER

PROMPT = "a prompt of some length, long enough for pages"


def ids(text=PROMPT):
    return list(block_ids(pack(list(text.encode())), BLOCK_TOKENS))


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_request_when_forwarded_then_body_and_headers_arrive_as_they_were(path):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            raw = b'{"text":  "caf\xc3\xa9", "odd": 1.50}'
            headers = {"authorization": "Bearer key", "content-type": "application/json"}
            async with rig.client.post(f"{rig.served.url}{path}?x=1", data=raw, headers=headers) as response:
                assert (await response.json())["path"] == path
            body, seen = rig.servers[0].seen[0]
            assert body == raw and seen["authorization"] == "Bearer key"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/messages", "text/event-stream"), ("/v1/messages", "text/plain"), ("/close_session", "text/plain")],
)
@pytest.mark.parametrize("name", ["caf\xe9", "caf\xc3\xa9", "\xe2\x86\x92"])
def test_headers_when_they_have_more_than_ascii_then_both_sides_get_the_bytes_that_were_sent(path, kind, name):
    async def scenario():
        server = FakeServer(name)
        server.says = {path: (200, kind, b"data: x\n\n")}
        async with running([server]) as rig:
            asked = {"x-session-id": "caf\xe9 \u2192", "authorization": "Bearer \xe9"}
            async with rig.client.post(f"{rig.served.url}{path}", json={}, headers=asked) as response:
                assert response.headers["x-said-by"].encode(errors="surrogateescape") == name.encode("latin-1")
            (_, seen), *_ = server.seen
            assert {header: seen[header].encode("latin-1").decode() for header in asked} == asked
            await until(lambda: not rig.router.all_servers[0].in_flight)
            rig.assert_idle()

    asyncio.run(scenario())


def test_stream_when_an_event_is_there_then_it_is_passed_on_before_the_next():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].gate.clear()
            async with rig.client.post(f"{rig.served.url}/generate", json={"text": "hi", "stream": True}) as response:
                first = await response.content.readuntil(b"\n\n")
                assert json.loads(first[6:])["number"] == 0
                assert response.content_type == "text/event-stream"
                rig.servers[0].gate.set()
                assert (await response.read()).endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


@pytest.mark.parametrize("banyan", [False, True])
def test_request_when_a_server_has_ranks_then_one_is_pinned_unless_banyan_places_there(banyan):
    async def scenario():
        async with running([FakeServer("a", num_ranks=2, banyan=banyan)]) as rig:
            for _ in range(4):
                await rig.ask(text="hi")
            pinned = [json.loads(body).get("routed_dp_rank") for body, _ in rig.servers[0].seen]
            assert sorted(pinned, key=str) == ([None] * 4 if banyan else [0, 0, 1, 1])

    asyncio.run(scenario())


def test_request_when_the_client_pins_a_rank_then_the_pin_stays():
    async def scenario():
        async with running([FakeServer("a", num_ranks=2)]) as rig:
            for _ in range(3):
                await rig.ask(text="hi", routed_dp_rank=1)
            assert [json.loads(body)["routed_dp_rank"] for body, _ in rig.servers[0].seen] == [1, 1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "/generate", "input_ids": list(PROMPT.encode())},
        {"path": "/generate", "text": PROMPT},
        {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": PROMPT}]},
    ],
)
def test_request_when_events_say_who_holds_its_prefix_then_it_goes_there(fields):
    async def scenario():
        servers = [FakeServer(name, events=True) for name in "abc"]
        async with running(servers, policy="lmetric") as rig:
            for holder, gone in ((2, BlockRemoved(ids())), (0, AllBlocksCleared())):
                publisher, blocks = servers[holder].publishers[0], rig.router.fleet.servers[holder].feeds[0].blocks
                await publisher.send(BlockStored(ids()))
                await until(partial(len, blocks))
                for _ in range(3):
                    assert json.loads((await rig.ask(**fields))[2])["text"] == servers[holder].name
                await publisher.send(gone)
                await until(partial(operator.not_, blocks))

    asyncio.run(scenario())


def test_events_when_the_router_starts_late_or_misses_some_then_it_asks_for_them_again():
    async def scenario():
        server = FakeServer("a", events=True)
        publisher = server.publishers[0]
        first, second, third = ids()[:1], ids()[1:2], ids()[2:3]
        await publisher.send(BlockStored(first))
        async with running([server]) as rig:
            feed = rig.router.fleet.servers[0].feeds[0]
            await until(lambda: len(feed.blocks) == 1)
            await publisher.send(BlockStored(second), lose=True)
            await publisher.send(BlockStored(third))
            await until(lambda: len(feed.blocks) == 3)
            assert feed.num_holes == 0

    asyncio.run(scenario())


def test_events_when_there_are_very_many_ranks_then_there_are_sockets_for_their_feeds():
    async def scenario():
        async with running([FakeServer("a", events=True)]) as rig:
            assert rig.router._context.get(zmq.MAX_SOCKETS) >= 3 * MAX_RANKS

    asyncio.run(scenario())


def test_events_when_a_rank_stands_still_as_it_is_asked_for_those_of_before_then_it_is_asked_again(monkeypatch):
    monkeypatch.setattr(subscription, "REPLAY_TIMEOUT_S", 0.1)

    async def scenario():
        server = FakeServer("a", events=True)
        server.publishers[0].num_unheard = 2
        await server.publishers[0].send(BlockStored(ids()[:1]))
        async with running([server]) as rig:
            feed = rig.router.fleet.servers[0].feeds[0]
            await until(lambda: len(feed.blocks) == 1)

    asyncio.run(scenario())


def test_request_when_servers_announce_events_and_none_comes_then_it_goes_where_its_text_went_and_a_line_says_so(
    monkeypatch, caplog
):
    monkeypatch.setattr(subscription, "SILENT_S", 0.1)

    async def scenario():
        servers = [FakeServer(name, events=True) for name in "abc"]
        async with running(servers, policy="lmetric") as rig:
            text = "x" * 3000
            first = json.loads((await rig.ask(text=text))[2])["text"]
            assert [json.loads((await rig.ask(text=text + str(turn)))[2])["text"] for turn in range(6)] == [first] * 6
            silent = next(server.url for server in servers if server.name == first)
            await until(lambda: "none of its KV events" in caplog.text)
            await asyncio.sleep(0.3)
            (line,) = [record.getMessage() for record in caplog.records if "KV events has come" in record.getMessage()]
            assert silent in line and '"bind"' in line

    asyncio.run(scenario())


def test_request_when_servers_send_no_events_then_it_goes_where_its_text_went():
    async def scenario():
        async with running([FakeServer(name) for name in "abc"], policy="lmetric") as rig:
            text = "x" * 3000
            first = json.loads((await rig.ask(text=text))[2])["text"]
            assert [json.loads((await rig.ask(text=text + str(turn)))[2])["text"] for turn in range(6)] == [first] * 6

    asyncio.run(scenario())


def test_queue_when_it_is_full_then_429_and_when_it_stands_still_then_503():
    async def scenario():
        async with running([FakeServer("a")], max_in_flight=1, max_waiting=1, queue_timeout_s=0.2) as rig:
            (a,) = rig.servers
            a.gate.clear()
            running_one = asyncio.create_task(rig.ask(text="one"))
            await until(lambda: a.num_running == 1)
            waiting = asyncio.create_task(rig.ask(text="two"))
            await until(lambda: rig.router.forwarder.admission.num_waiting == 1)
            status, headers, body = await rig.ask(text="three")
            assert status == 429 and int(headers["retry-after"]) >= 1 and b"waiting" in body
            status, headers, body = await waiting
            assert status == 503 and "retry-after" in headers and a.url.encode() in body
            a.gate.set()
            assert (await running_one)[0] == 200
            rig.assert_idle()

    asyncio.run(scenario())


def test_client_when_it_goes_away_then_the_server_is_told_and_the_place_is_free():
    async def scenario():
        async with running([FakeServer("a")], max_in_flight=1) as rig:
            (a,) = rig.servers
            a.gate.clear()
            for stream in (True, False):
                asked = asyncio.create_task(rig.ask(text="hi", stream=stream))
                await until(lambda: a.num_running == 1)
                asked.cancel()
                await until(lambda: not rig.router.fleet.servers[0].in_flight)
                rig.assert_idle()
                if stream:
                    await until(lambda: a.num_left == 1 and a.num_running == 0)

    asyncio.run(scenario())


def test_drain_when_asked_for_then_nothing_new_goes_there_and_what_runs_ends_well():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        async with running([a, b]) as rig:
            a.gate.clear()
            b.gate.clear()
            begun = [asyncio.create_task(rig.ask(text="hi")) for _ in range(2)]
            await until(lambda: rig.num_seen() == [1, 1])
            assert (await rig.post(f"/router/drain?server={a.url}"))[0] == 200
            a.gate.set()
            b.gate.set()
            assert [status for status, _, _ in await asyncio.gather(*begun)] == [200, 200]
            for _ in range(3):
                await rig.ask(text="hi")
            assert rig.num_seen() == [1, 4]
            await rig.post(f"/router/resume?server={a.url}")
            for _ in range(2):
                await rig.ask(text="hi")
            assert rig.num_seen() == [2, 5]
            assert (await rig.post("/router/drain?server=http://nobody"))[0] == 404

    asyncio.run(scenario())


def test_router_when_it_stops_then_new_requests_get_503_and_running_ones_end():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].gate.clear()
            begun = asyncio.create_task(rig.ask(text="hi"))
            await until(lambda: rig.servers[0].num_running == 1)
            rig.router.is_stopping = True
            status, headers, _ = await rig.ask(text="hi")
            assert status == 503 and "retry-after" in headers
            assert (await rig.get("/health"))[0] == 503
            rig.servers[0].gate.set()
            assert (await begun)[0] == 200

    asyncio.run(scenario())


def test_load_when_a_server_does_not_tell_it_then_the_routers_own_books_do():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        a.loads_status = b.loads_status = 404
        async with running([a, b], policy="lmetric") as rig:
            a.gate.clear()
            b.gate.clear()
            asked = [asyncio.create_task(rig.ask(text="hi")) for _ in range(8)]
            await until(lambda: sum(rig.num_seen()) == 8)
            assert rig.num_seen() == [4, 4]
            a.gate.set()
            b.gate.set()
            await asyncio.gather(*asked)

    asyncio.run(scenario())


def test_request_when_a_server_tells_loads_beyond_all_bounds_then_another_answers_it():
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        a.reads = {"num_waiting_uncached_tokens": 10**300, "num_total_tokens": 10**400}
        async with running([a, b], is_up=False, policy="lmetric") as rig:
            await until(lambda: rig.state(1) is State.UP and "loads" in rig.router.fleet.servers[0].health.last_error)
            assert json.loads((await rig.ask(text="hi"))[2])["text"] == "b"

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/loads", "/health"])
def test_request_when_a_server_tells_without_end_how_it_is_then_another_answers_it(path):
    async def scenario():
        a, b = FakeServer("a"), FakeServer("b")
        a.answers_with = {path: b'"%b"' % (b"x" * (9 << 20))}
        async with running([a, b], is_up=False) as rig:
            await until(lambda: rig.state(1) is State.UP and "8 MiB" in rig.router.fleet.servers[0].health.last_error)
            assert [json.loads((await rig.ask(text="hi"))[2])["text"] for _ in range(2)] == ["b", "b"]

    asyncio.run(scenario())


def test_server_when_it_has_many_ranks_then_it_may_say_more_of_itself():
    async def scenario():
        a = FakeServer("a")
        a.more_info = {"banyan_of_many_ranks": "x" * (9 << 20)}
        async with running([a]) as rig:
            assert (await rig.ask(text="hi"))[0] == 200

    asyncio.run(scenario())


def test_load_when_the_machines_clock_is_set_back_then_what_servers_tell_still_counts(monkeypatch):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            (server,), real_s = rig.router.fleet.servers, time.time
            monkeypatch.setattr(time, "time", lambda: real_s() - 3600)
            before = server.loads[0]
            await until(lambda: server.loads[0].taken_s > before.taken_s)
            assert (await rig.ask(text="hi"))[0] == 200

    asyncio.run(scenario())


def test_models_when_listed_then_those_of_all_servers_once():
    async def scenario():
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            status, body = await rig.get("/v1/models")
            assert status == 200
            assert sorted(card["id"] for card in json.loads(body)["data"]) == ["only-a", "only-b", "shared"]
            rig.servers[0].answers_with["/v1/models"] = b'{"data": [{"id": "a", "much": "%b"}]}' % (b"x" * (9 << 20))
            _, body = await rig.get("/v1/models")
            assert sorted(card["id"] for card in json.loads(body)["data"]) == ["only-b", "shared"]

    asyncio.run(scenario())


def test_tokens_when_a_server_tells_too_many_then_the_prompt_is_compared_as_text(monkeypatch):
    monkeypatch.setattr(tokens, "MOST_BYTES", 1 << 20)

    async def scenario():
        async with running([FakeServer("a", events=True)]) as rig:
            for size, num_untokenised in ((1 << 18, 0), (1 << 20, 1)):
                rig.servers[0].answers_with["/tokenize"] = b'{"tokens": [%b1]}' % (b"1," * (size // 2))
                assert (await rig.ask(text="hi"))[0] == 200
                said = f"banyan_router_untokenised_total {num_untokenised}.0"
                assert said.encode() in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())


def test_metrics_when_nothing_was_lost_yet_then_the_counts_of_losses_are_there_to_rise():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            _, body = await rig.get("/metrics")
            for outcome in ("lost", "broken"):
                said = f'banyan_router_attempts_total{{outcome="{outcome}",server="{rig.servers[0].url}"}} 0.0'
                assert said in body.decode()

    asyncio.run(scenario())


def test_metrics_when_read_then_attempts_and_tokens_are_counted():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            await rig.ask(input_ids=[1, 2, 3])
            _, body = await rig.get("/metrics")
            url = rig.servers[0].url
            assert f'banyan_router_attempts_total{{outcome="answered",server="{url}"}} 1.0' in body.decode()
            assert f'banyan_router_server_up{{server="{url}"}} 1.0' in body.decode()
            assert "banyan_router_prompt_tokens_total 3.0" in body.decode()

    asyncio.run(scenario())


def test_servers_when_listed_then_their_state_and_last_error():
    async def scenario():
        async with running([FakeServer("a")], is_up=False) as rig:
            await rig.servers[0].kill()
            await until(lambda: "connect" in rig.router.fleet.servers[0].health.last_error)
            (state,) = json.loads((await rig.get("/router/servers"))[1])
            assert state["server"] == rig.servers[0].url and state["state"] != "up"

    asyncio.run(scenario())


def test_body_when_it_is_too_large_then_413_and_no_server_is_asked():
    async def scenario():
        async with running([FakeServer("a")], max_body_mib=1) as rig:
            status, _, body = await rig.ask(text="x" * (1 << 20))
            assert status == 413 and b"--max-body-mib" in body
            assert rig.num_seen() == [0]

    asyncio.run(scenario())


def test_client_when_it_accepts_compression_then_the_server_is_asked_for_none():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            headers = {"accept-encoding": "gzip"}
            async with rig.client.post(f"{rig.served.url}/generate", json={"text": "hi"}, headers=headers) as response:
                assert response.status == 200
            assert rig.servers[0].seen[0][1]["accept-encoding"] == "identity"

    asyncio.run(scenario())


LENDS, ELSEWHERE = "10.0.0.1:7400", "10.0.0.2:7400"


def nodes(*asked):
    """A server that lends, and one that asks ``asked``."""
    lender, borrower = (FakeServer(name, events=True, banyan=True) for name in ("lender", "borrower"))
    lender.banyan_state = {"tells_arena": True, "page_server": {"address": LENDS, "most_read_tokens": 0}}
    borrower.banyan_state = {"tells_arena": True, "nodes": {"asked": list(asked)}}
    return lender, borrower


@pytest.mark.parametrize(
    ("asked", "events", "said"),
    [
        ((LENDS, ELSEWHERE), [BlockStored(ids(), ARENA)], [LENDS]),
        ((LENDS,), [AllBlocksCleared(), BlockStored(ids(), "GPU")], ["none"]),
        ((LENDS, ELSEWHERE), [AllBlocksCleared(), BlockStored(ids(), "GPU")], [None]),
        ((ELSEWHERE,), [BlockStored(ids(), ARENA)], [None]),
    ],
)
def test_request_when_a_servers_arena_has_its_prompt_then_another_one_is_told_and_a_clients_word_is_dropped(
    asked, events, said
):
    async def scenario():
        lender, borrower = nodes(*asked)
        async with running([lender, borrower]) as rig:
            await lender.publishers[0].send(*events)
            await until(lambda: len(rig.router.fleet.servers[0].feeds[0].blocks))
            await rig.post(f"/router/drain?server={lender.url}")
            headers = {SOURCE_HEADER: "10.6.6.6:1", READ_HEADER: "10.6.6.6:1 0"}
            url, body = f"{rig.served.url}/generate", {"input_ids": list(PROMPT.encode())}
            async with rig.client.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200
            (_, seen), (_, metrics) = borrower.seen[0], await rig.get("/metrics")
            assert [seen.get(SOURCE_HEADER)] == said and READ_HEADER not in seen
            told = [line for line in metrics.decode().splitlines() if line.startswith("banyan_router_sources_total")]
            labels = f'server="{borrower.url}",source="{said[0]}"'
            assert told == ([] if said == [None] else [f"banyan_router_sources_total{{{labels}}} 1.0"])
            (state,) = [one for one in json.loads((await rig.get("/router/servers"))[1]) if one["borrows_from"]]
            assert (state["server"], state["borrows_from"]) == (borrower.url, list(asked))

    asyncio.run(scenario())


def test_request_when_the_server_that_has_its_prompt_was_lost_then_the_next_one_is_not_sent_there():
    async def scenario():
        lender, borrower = nodes(LENDS)
        async with running([lender, borrower], policy="lmetric") as rig:
            await lender.publishers[0].send(BlockStored(ids(), ARENA))
            await until(lambda: len(rig.router.fleet.servers[0].feeds[0].blocks))
            lender.status = 503
            assert (await rig.ask(input_ids=list(PROMPT.encode())))[0] == 200
            assert rig.num_seen() == [1, 1]
            assert [server.seen[0][1].get(SOURCE_HEADER) for server in (lender, borrower)] == [None, None]

    asyncio.run(scenario())


def test_request_when_a_servers_store_has_its_prompt_then_it_goes_there_and_the_router_shows_what_it_knows():
    async def scenario():
        empty, holder = (FakeServer(name, events=True, banyan=True) for name in ("empty", "holder"))
        empty.banyan_state, holder.banyan_state = {"tells_store": "a"}, {"tells_store": "b"}
        async with running([empty, holder], policy="lmetric") as rig:
            await holder.publishers[0].send(BlockStored(ids(), STORE))
            await until(lambda: len(rig.router.fleet.servers[1].feeds[0].blocks))
            for _ in range(3):
                assert (await rig.ask(input_ids=list(PROMPT.encode())))[0] == 200
            assert rig.num_seen() == [0, 3]
            states = json.loads((await rig.get("/router/servers"))[1])
            told = [(state["store"], state["known_stored_blocks"], state["known_arena_blocks"]) for state in states]
            assert told == [("a", [0], [0]), ("b", [len(ids())], [0])]
            gauge = f'banyan_router_known_stored_blocks{{server="{holder.url}"}} {len(ids())}.0'
            assert gauge in (await rig.get("/metrics"))[1].decode()

    asyncio.run(scenario())
