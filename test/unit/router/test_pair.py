# SPDX-License-Identifier: Apache-2.0
"""A router in front of pairs: one room for each attempt, and a second attempt when a half of one fails."""

from __future__ import annotations

import asyncio
import json

import pytest
from test.unit.router.fake_pair import REFUSED, FakeDecode, FakePrefill, Rooms
from test.unit.router.fake_server import BLOCK_TOKENS, BOOTSTRAP_PORT, TEST_TIMEOUT_S, FakeServer, running, until

from banyan.core import LOAD_FAILED
from banyan.router import pair as pairs
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import ARENA, STORE, block_ids, pack
from banyan.router.events import BlockStored
from banyan.router.health import State
from banyan.router.prompt import Request
from banyan.router.settings import Settings
from banyan.routing.headers import PLAN_HEADER, READ_HEADER, SOURCE_HEADER

DAMAGED = (503, LOAD_FAILED)


def fields_of(server):
    return [json.loads(body) if isinstance(body, bytes) else body for body, _ in server.seen]


def rooms_of(server):
    return [fields["bootstrap_room"] for fields in fields_of(server)]


def headers_of(server):
    return [headers for _, headers in server.seen]


def pair(num_prefills=1, num_decodes=1, **more):
    """Servers that meet in the same rooms: prefills first."""
    rooms = Rooms()
    prefills = [FakePrefill(f"p{number}", rooms, **more) for number in range(num_prefills)]
    return prefills, [FakeDecode(f"d{number}", rooms) for number in range(num_decodes)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_request_when_there_is_a_pair_then_both_meet_in_a_room_and_the_decode_server_answers(path, stream):
    async def scenario():
        (p,), (d,) = pair()
        async with running([p, d]) as rig:
            for _ in range(2):
                status, _, body = await rig.ask(path, text="hi", stream=stream)
                assert status == 200 and b"d0" in body
            assert rooms_of(p) == rooms_of(d) and len(set(rooms_of(p))) == 2
            (fields, _) = fields_of(p)
            assert (fields["bootstrap_host"], fields["bootstrap_port"]) == ("127.0.0.1", BOOTSTRAP_PORT)
            await until(lambda: not any(server.in_flight for server in rig.router.all_servers))
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_request_when_a_page_is_damaged_then_the_second_attempt_computes_in_another_room(stream, tells):
    async def scenario():
        (p,), (d,) = pair(tells=tells)
        p.answers = [DAMAGED]
        async with running([p, d]) as rig:
            status, _, body = await rig.ask(text="hi", stream=stream)
            assert status == 200 and b"d0" in body and b"failed" not in body
            assert len(set(rooms_of(p))) == 2
            assert [headers.get(PLAN_HEADER) for headers in headers_of(p)] == [None, "compute"]
            assert headers_of(d)[-1][PLAN_HEADER] == "compute"
            await until(lambda: not any(server.in_flight for server in rig.router.all_servers))
            rig.assert_idle()

    asyncio.run(scenario())


async def chosen(servers):
    """The one that got the request, and another one."""
    await until(lambda: any(server.seen or server.num_running for server in servers))
    return sorted(servers, key=lambda server: not (server.seen or server.num_running))


async def two_at_one_pair(rig, servers, **fields):
    """Two requests that are under way at one of ``servers``, in order, and that one first, then another."""
    first = asyncio.create_task(rig.ask(text="first", **fields))
    victim, other = await chosen(servers)
    place = [server.url for server in rig.router.all_servers].index(other.url)
    rig.router.all_servers[place].is_draining = True
    second = asyncio.create_task(rig.ask(text="second", **fields))
    await until(lambda: under_way(rig) == 4)
    rig.router.all_servers[place].is_draining = False
    return (first, second), victim, other


def under_way(rig):
    """Halves of requests."""
    return sum(len(server.in_flight) for server in rig.router.all_servers)


@pytest.mark.parametrize("silent", [False, True])
def test_requests_when_their_prefill_server_is_lost_then_another_pair_answers_all_but_the_last(silent):
    async def scenario():
        prefills, (d,) = pair(num_prefills=2)
        for p in prefills:
            p.hands_over.clear()
        async with running([*prefills, d]) as rig:
            asked, victim, other = await two_at_one_pair(rig, prefills)
            await until(lambda: len(victim.seen) == 2)
            other.hands_over.set()
            if silent:
                victim.awake.clear()
            else:
                await victim.kill()
            (status, _, body), last = await asyncio.gather(*asked)
            assert (status, json.loads(body)["text"], last[0]) == (200, "d0", 502)
            assert len(other.seen) == 1 and PLAN_HEADER not in headers_of(other)[0]
            await until(lambda: rig.state(prefills.index(victim)) is State.DOWN)
            await until(lambda: not under_way(rig))
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_requests_when_their_decode_server_dies_then_another_pair_answers_all_but_the_last(stream):
    async def scenario():
        (p,), decodes = pair(num_decodes=2)
        p.hands_over.clear()
        async with running([p, *decodes]) as rig:
            asked, victim, other = await two_at_one_pair(rig, decodes, stream=stream)
            await until(lambda: len(p.seen) == 2)
            await victim.kill()
            p.hands_over.set()
            (status, _, body), last = await asyncio.gather(*asked)
            assert status == 200 and other.name.encode() in body and last[0] == 502
            await until(lambda: not under_way(rig))
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_its_decode_server_breaks_off_then_another_one_is_tried_without_a_wait(monkeypatch):
    monkeypatch.setattr(pairs, "VERDICT_S", TEST_TIMEOUT_S)

    async def scenario():
        prefills, decodes = pair(num_prefills=2, num_decodes=2)
        for p in prefills:
            p.hands_over.clear()
        async with running([*prefills, *decodes]) as rig:
            asked = asyncio.create_task(rig.ask(text="hi"))
            (victim, other), (_, well) = await chosen(decodes), await chosen(prefills)
            rig.drop_connections(victim)
            well.hands_over.set()
            status, _, body = await asked
            assert (status, json.loads(body)["text"]) == (200, other.name)
            await until(lambda: not under_way(rig))
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("says", ["nothing", "aborted"])
def test_request_when_its_decode_server_fails_it_then_both_servers_of_the_next_pair_are_others(says, monkeypatch):
    settle, goes_on = pairs._settle, asyncio.Event()

    async def settle_later(half):
        await goes_on.wait()
        return await settle(half) if says == "aborted" else False

    monkeypatch.setattr(pairs, "_settle", settle_later)

    async def scenario():
        prefills, decodes = pair(num_prefills=2, num_decodes=2)
        for p, d in zip(prefills, decodes, strict=True):
            d.refuses = 500
            p.hands_over.clear()
            p.answers = [(500, "aborted")] if says == "aborted" else []
        async with running([*prefills, *decodes]) as rig:
            asked = asyncio.create_task(rig.ask(text="hi"))
            (_, well), (_, other) = await chosen(decodes), await chosen(prefills)
            well.refuses, other.answers = 0, []
            other.hands_over.set()
            # It is the failed pair's turn now.
            assert (await rig.ask(text="another"))[0] == 200
            goes_on.set()
            status, _, body = await asked
            assert (status, json.loads(body)["text"], len(other.seen)) == (200, well.name, 2)
            await until(lambda: not under_way(rig))
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_request_when_pages_cannot_be_taken_back_then_the_next_attempt_computes(stream):
    async def scenario():
        (p,), (d,) = pair()
        p.answers = [(500, "aborted")]
        d.failures = [f"of request {'x' * 400}: {LOAD_FAILED}: pages of this decode server's arena"]
        async with running([p, d]) as rig:
            status, _, body = await rig.ask(text="hi", stream=stream)
            assert status == 200 and b"d0" in body
            assert [headers.get(PLAN_HEADER) for headers in headers_of(d)] == [None, "compute"]
            assert headers_of(p)[-1][PLAN_HEADER] == "compute"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_request_when_a_server_gets_it_again_then_its_id_is_not_the_one_that_the_server_still_knows(stream):
    async def scenario():
        (p,), (d,) = pair()
        p.answers = [DAMAGED]
        async with running([p, d]) as rig:
            assert (await rig.ask(text="hi", rid="mine", stream=stream))[0] == 200
            for server in (p, d):
                first, second = (fields["rid"] for fields in fields_of(server))
                assert first == "mine" and not second.startswith("mine")

    asyncio.run(scenario())


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_request_when_a_server_of_its_pair_dies_of_it_then_no_other_pair_sees_it(half):
    async def scenario():
        prefills, decodes = pair(num_prefills=2, num_decodes=2)
        async with running([*prefills, *decodes], max_retries=5) as rig:
            for p in prefills:
                p.hands_over.clear()
            asked = asyncio.create_task(rig.ask(text="hi"))
            side = prefills if half == "prefill" else decodes
            victim, _ = await chosen(side)
            await until(lambda: any(p.seen for p in prefills))
            await victim.kill()
            assert (await asked)[0] == 502
            assert sum(len(p.seen) for p in prefills) == 1

    asyncio.run(scenario())


def test_request_when_the_prefill_server_refuses_it_then_its_words_are_the_answer_and_nobody_waits():
    async def scenario():
        (p,), (d,) = pair(tells=False)
        p.answers = [(400, "too long")]
        async with running([p, d]) as rig:
            status, _, body = await rig.ask(text="hi")
            assert (status, json.loads(body)["detail"]) == (400, "too long")
            assert len(p.seen) == 1
            await until(lambda: d.num_running == 0)
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_the_prefill_server_stays_broken_then_the_client_gets_its_reason():
    async def scenario():
        (p,), (d,) = pair()
        p.answers = [DAMAGED, DAMAGED]
        async with running([p, d]) as rig:
            status, _, body = await rig.ask(text="hi")
            assert status == 503 and LOAD_FAILED in body.decode()
            assert len(p.seen) == 2
            rig.assert_idle()

    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "stream"), [(429, False), (503, False), (503, True)])
def test_request_when_a_decode_server_is_full_then_another_one_answers_and_no_prefill_server_is_blamed(status, stream):
    async def scenario():
        (p,), (full, other) = pair(num_decodes=2)
        full.refuses = status
        p.hands_over.clear()
        async with running([p, full, other]) as rig:
            # One to each of them.
            asked = [asyncio.create_task(rig.ask(text="hi", stream=stream)) for _ in range(2)]
            await until(lambda: len(p.seen) == 3)
            p.hands_over.set()
            assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200]
            assert [len(server.seen) for server in (p, full, other)] == [3, 1, 2]
            await until(lambda: not under_way(rig))
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_every_decode_server_is_full_then_its_answer_is_passed_on():
    async def scenario():
        (p,), (full,) = pair()
        full.refuses = 503
        p.hands_over.clear()
        async with running([p, full]) as rig:
            status, headers, body = await rig.ask(text="hi")
            p.hands_over.set()
            assert (status, json.loads(body)["detail"]) == (503, REFUSED) and "retry-after" in headers
            assert len(full.seen) == 2, "a pair is asked again"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_request_when_only_the_decode_server_refuses_it_then_the_prefill_server_does_not_wait(stream, monkeypatch):
    monkeypatch.setattr("banyan.router.pair.LEFT_S", 0.01)

    async def scenario():
        (p,), (d,) = pair()
        d.refuses = 400
        p.hands_over.clear()
        async with running([p, d]) as rig:
            status, _, body = await rig.ask(text="hi", stream=stream)
            assert status == (200 if stream else 400) and REFUSED in body.decode()
            await until(lambda: p.seen and not under_way(rig))
            p.hands_over.set()
            rig.assert_idle()

    asyncio.run(scenario())


def test_requests_when_the_decode_server_that_has_what_they_follow_is_full_then_they_wait_for_it():
    async def scenario():
        (p,), (home, other) = pair(num_decodes=2)
        async with running([p, home, other], max_in_flight=1) as rig:
            forwarder = rig.router.forwarder
            asked = Asked(Request(text=b"hi", follows="resp_1"), held_at=home.url)
            place = forwarder._take(asked, ())
            rig.router.fleet.release(place.beside)
            assert place.target.server.url == home.url and forwarder._take(asked, ()) is None
            forwarder._release(place)
            rig.assert_idle()

    asyncio.run(scenario())


def test_stream_when_its_prefill_server_is_lost_after_its_first_event_then_it_goes_on():
    async def scenario():
        (p,), (d,) = pair()
        async with running([p, d]) as rig:
            p.gate.clear()
            d.gate.clear()
            async with rig.client.post(f"{rig.served.url}/generate", json={"stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                prefill, _ = rig.router.all_servers
                await until(lambda: prefill.in_flight)
                rig.drop_connections(p)
                await until(lambda: not prefill.in_flight)
                d.gate.set()
                assert (await response.read()).endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


def test_client_when_it_goes_away_then_both_halves_are_ended():
    async def scenario():
        (p,), (d,) = pair()
        p.hands_over.clear()
        async with running([p, d]) as rig:
            asked = asyncio.create_task(rig.ask(text="hi"))
            await until(lambda: p.seen and d.num_running)
            asked.cancel()
            await until(lambda: not any(server.in_flight for server in rig.router.all_servers))
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_when_it_needs_no_pair_and_waits_for_one_that_does_then_it_has_the_place_next():
    async def scenario():
        (p,), (d,) = pair()
        async with running([p, d], max_in_flight=1) as rig:
            p.hands_over.clear()
            first = asyncio.create_task(rig.ask(text="hi"))
            await until(lambda: d.num_running)
            beside = asyncio.create_task(rig.get("/model_info"))
            await until(lambda: rig.router.beside.admission.num_waiting)
            p.hands_over.set()
            assert [(await first)[0], (await beside)[0]] == [200, 200]
            d.says["/model_info"] = (200, "text/plain", held := asyncio.Event())
            beside = asyncio.create_task(rig.get("/model_info"))
            await until(lambda: len(d.seen) == 3)
            second = asyncio.create_task(rig.ask(text="hi"))
            await until(lambda: rig.router.forwarder.admission.num_waiting)
            held.set()
            assert [(await beside)[0], (await second)[0]] == [200, 200]
            await until(lambda: not under_way(rig))
            rig.assert_idle()

    asyncio.run(scenario())


def test_room_when_a_stock_prefill_server_has_ranks_then_it_leads_to_the_chosen_one():
    async def scenario():
        (p,), (d,) = pair(num_ranks=3)
        async with running([p, d]) as rig:
            for _ in range(6):
                await rig.ask(text="hi")
            assert sorted(room % 3 for room in rooms_of(p)) == [0, 0, 1, 1, 2, 2]
            assert not any("routed_dp_rank" in fields for fields in fields_of(p))

    asyncio.run(scenario())


def test_server_when_its_role_is_another_then_it_takes_no_requests_and_the_reason_is_shown():
    async def scenario():
        rooms = Rooms()
        alone = FakeServer("alone")
        servers = [FakePrefill("p0", rooms), FakeDecode("d0", rooms)]
        async with running([alone, *servers], is_up=False, instead={"servers": (), "prefills": (alone.url,)}) as rig:
            await until(lambda: "--disaggregation-mode" in rig.router.fleet.servers[0].health.last_error)
            assert not rig.router.fleet.servers[0].takes_requests
            status, _ = await rig.get("/health")
            assert status == 503

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({}, "--server"),
        ({"prefills": ("http://a:1",)}, "--decode"),
        ({"decodes": ("http://a:1",)}, "--prefill"),
        ({"servers": ("http://b:1",), "prefills": ("http://a:1",), "decodes": ("http://c:1",)}, "--server"),
        ({"prefills": ("http://a:1",), "decodes": ("http://a:1",)}, "twice"),
        ({"prefills": ("a:1",), "decodes": ("http://c:1",)}, "--prefill a:1"),
    ],
)
def test_settings_when_servers_and_pairs_do_not_fit_then_the_flag_is_named(fields, flag):
    with pytest.raises(ValueError, match=flag):
        Settings(**fields)


PAGE_SERVER = "10.0.0.2:7400"
LONG = list(range(1, 1025))


def dual(**more):
    """A pair of which the decode server reads for the prefill server."""
    (p,), (d,) = pair(banyan=True)
    p.banyan_state = {"waits_for_remote_prefetches": True, "store": {}, "nodes": {"asked": [PAGE_SERVER]}} | more
    d.banyan = True
    d.banyan_state = {"page_server": {"address": PAGE_SERVER, "most_read_tokens": 100_000}}
    return p, d


def hints_of(server):
    return [headers.get(READ_HEADER) for headers in headers_of(server)]


def test_prompt_when_it_was_sent_before_then_both_servers_read_a_part_of_it():
    async def scenario():
        p, d = dual()
        async with running([p, d]) as rig:
            for _ in range(2):
                assert (await rig.ask(input_ids=LONG))[0] == 200
            assert hints_of(p) == [None, f"{PAGE_SERVER} 512"]
            await until(lambda: not any(server.in_flight for server in rig.router.all_servers))
            rig.assert_idle()
            _, text = await rig.get("/metrics")
            for server in (p, d):
                assert f'given_tokens_total{{server="{server.url}"}} 512.0' in text.decode()

    asyncio.run(scenario())


@pytest.mark.parametrize(("medium", "hint"), [(STORE, f"{PAGE_SERVER} 512"), (ARENA, None)])
def test_prompt_when_the_prefill_server_tells_that_it_has_it_then_what_its_store_has_is_still_to_be_read(medium, hint):
    async def scenario():
        p, d = FakePrefill("p", rooms := Rooms(), banyan=True, events=True), FakeDecode("d", rooms, banyan=True)
        like_p, like_d = dual()
        p.banyan_state, d.banyan_state = like_p.banyan_state, like_d.banyan_state
        async with running([p, d]) as rig:
            await rig.ask(input_ids=LONG)
            await p.publishers[0].send(BlockStored(list(block_ids(pack(LONG), BLOCK_TOKENS)), medium))
            await until(lambda: len(rig.router.fleet.servers[0].feeds[0].blocks))
            await rig.ask(input_ids=LONG)
            assert hints_of(p) == [None, hint]

    asyncio.run(scenario())


def test_router_when_a_pair_is_up_then_it_says_once_who_reads_for_whom(caplog):
    async def scenario():
        p, d = dual()
        async with running([p, d]):
            (line,) = [line for line in caplog.messages if "reads parts of prompts" in line]
            assert line == f"{d.url} reads parts of prompts for {p.url}"

    caplog.set_level("INFO", logger="banyan.router")
    asyncio.run(scenario())


def test_prompt_when_only_the_prefill_server_reads_slowly_then_the_decode_server_reads_all():
    async def scenario():
        p, d = dual()
        p.reads, d.reads = {"read_tokens_per_s": 900}, {"read_tokens_per_s": 60_000, "read_queue_tokens": 1_000}
        async with running([p, d]) as rig:
            for _ in range(2):
                await rig.ask(input_ids=LONG)
            assert hints_of(p) == [None, f"{PAGE_SERVER} 0"]

    asyncio.run(scenario())


@pytest.mark.parametrize("off", ["flag", "page_server", "store", "waits", "queue"])
def test_prompt_when_the_decode_server_is_not_to_read_then_nothing_is_said_and_a_clients_word_is_dropped(off):
    async def scenario():
        p, d = dual(**{"store": {"store": None}, "waits": {"waits_for_remote_prefetches": False}}.get(off, {}))
        if off == "page_server":
            d.banyan_state["page_server"]["most_read_tokens"] = 0
        if off == "queue":
            d.reads = {"read_queue_tokens": 9_000}
        settings = {"dual_path": False} if off == "flag" else {}
        async with running([p, d], **settings) as rig:
            for _ in range(2):
                url = f"{rig.served.url}/generate"
                async with rig.client.post(
                    url, json={"input_ids": LONG}, headers={READ_HEADER: f"{PAGE_SERVER} 0"}
                ) as answer:
                    assert answer.status == 200
            assert hints_of(p) == [None, None]

    asyncio.run(scenario())


def test_requests_when_many_are_under_way_then_what_was_given_counts_before_it_is_reported():
    async def scenario():
        p, d = dual()
        async with running([p, d]) as rig:
            await rig.ask(input_ids=LONG)
            p.hands_over.clear()
            # The prefill server is also given what it alone can read: prompts of which nothing is split off.
            rig.router.fleet.servers[0].num_given_tokens += 600
            asked = asyncio.create_task(rig.ask(input_ids=LONG))
            await until(lambda: len(p.seen) == 2)
            assert hints_of(p)[-1] == f"{PAGE_SERVER} 0"
            servers = [*rig.router.fleet.servers, *rig.router.decodes.servers]
            assert [server.num_given_tokens for server in servers] == [600, 1024]
            p.hands_over.set()
            await asked
            await until(lambda: servers[1].num_given_tokens == 0)

    asyncio.run(scenario())


def test_attempt_when_it_follows_one_that_failed_then_its_prefill_server_reads_by_itself():
    async def scenario():
        p, d = dual()
        p.answers = [(200, ""), (503, "gone")]
        async with running([p, d]) as rig:
            for _ in range(2):
                assert (await rig.ask(input_ids=LONG))[0] == 200
            assert hints_of(p) == [None, f"{PAGE_SERVER} 512", None]

    asyncio.run(scenario())


def test_prompt_when_the_decode_servers_arena_has_it_then_the_prefill_server_is_told():
    async def scenario():
        rooms, tells = Rooms(), {"banyan": True, "events": True}
        p, d = FakePrefill("p", rooms, **tells), FakeDecode("d", rooms, **tells)
        p.banyan_state = {"nodes": {"asked": [PAGE_SERVER]}}
        d.banyan_state = {"tells_arena": True, "page_server": {"address": PAGE_SERVER, "most_read_tokens": 0}}
        async with running([p, d]) as rig:
            blocks = rig.router.decodes.servers[0].feeds[0].blocks
            await d.publishers[0].send(BlockStored(list(block_ids(pack(LONG), BLOCK_TOKENS)), ARENA))
            await until(lambda: len(blocks))
            assert (await rig.ask(input_ids=LONG))[0] == 200
            assert [headers.get(SOURCE_HEADER) for headers in headers_of(p)] == [PAGE_SERVER]

    asyncio.run(scenario())


def test_place_when_none_can_be_taken_at_a_decode_server_then_the_prefill_servers_is_free_again(monkeypatch):
    async def scenario():
        (p,), (d,) = pair()
        async with running([p, d]) as rig:
            monkeypatch.setattr(rig.router.decodes, "take", lambda *args: 1 / 0)
            assert (await rig.ask(text="hi"))[0] == 500
            rig.assert_idle()

    asyncio.run(scenario())
