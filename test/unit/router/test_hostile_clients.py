# SPDX-License-Identifier: Apache-2.0
"""What clients can do to a router that they should not be able to: slow bodies, odd headers, other people's pages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from itertools import count

import pytest
from test.unit.router.fake_server import FakeServer, raw, running, until

from banyan.router import prompt
from banyan.router.bodies import SMALL_BYTES, Answers, Bodies, Refused
from banyan.router.upstream import Attempt, Lost
from banyan.router.verdict import TooLong, WholeEvents
from banyan.routing.headers import PLAN_HEADER, READ_HEADER, SOURCE_HEADER
from banyan.routing.tenant_secret import TenantSecret


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/router/nothing"), ("GET", "/router/drain"), ("GET", "/v1/loads"), ("POST", "/dumper/x")),
        *(("GET", "/v1/realtime"), ("POST", "/v1/realtime")),
    ],
)
def test_request_when_neither_the_router_nor_a_server_behind_it_answers_it_then_404_in_the_form_that_clients_read(
    method, path
):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            async with rig.client.request(method, rig.served.url + path) as response:
                assert (response.status, response.content_type) == (404, "application/json")
                error = (await response.json())["error"]
            assert error["code"] == 404 and path in error["message"] and error["type"]
            assert rig.num_seen() == [0]

    asyncio.run(scenario())


def test_request_when_the_router_itself_fails_then_its_error_has_the_form_that_clients_read(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    async def scenario():
        async with running([FakeServer("a")]) as rig:
            monkeypatch.setattr(prompt, "read", fail)
            status, headers, body = await rig.ask(text="hi")
            assert (status, headers["content-type"]) == (500, "application/json")
            assert json.loads(body)["error"]["type"] == "internal_error"

    asyncio.run(scenario())


@pytest.mark.parametrize("character", ["\x01", "\x1b", "\x7f", "\u0085"])
@pytest.mark.parametrize("path", ["/model_info", "/v1/models", "/abort_request"])
def test_header_when_it_has_a_control_character_then_400_in_the_form_that_clients_read(character, path):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {character}x\r\n\r\n"
            answer = await raw(rig.served.port, head.encode())
            if character == "\u0085":
                assert answer.startswith(b"HTTP/1.1 200")
            else:
                assert answer.startswith(b"HTTP/1.1 400") and b"a header has a control character" in answer
                assert rig.num_seen() == [0]

    asyncio.run(scenario())


def test_body_when_it_does_not_come_then_408_and_the_connection_is_closed():
    async def scenario():
        async with running([FakeServer("a")], body_timeout_s=0.1) as rig:
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
            answer = await raw(rig.served.port, head + b'{"text"')
            assert answer.startswith(b"HTTP/1.1 408") and b"within 0.1 s" in answer
            assert rig.num_seen() == [0]
            assert b'banyan_router_refused_total{status="408"} 1.0' in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())


def test_bodies_when_there_is_no_room_for_more_then_the_next_is_refused_until_one_has_gone():
    async def parts(*given, then=None):
        for part in given:
            yield part
        if then is not None:
            await then.wait()

    async def scenario():
        bodies, rest, clients = Bodies(max_body_bytes=100, max_bytes=150, timeout_s=5.0), asyncio.Event(), count()

        async def read(stream):
            async with bodies.read(stream, f"client {next(clients)}") as body:
                return body

        slow = asyncio.create_task(read(parts(b"x" * 90, then=rest)))
        await until(lambda: bodies._all.num_bytes == 90)
        with pytest.raises(Refused, match="--max-buffered-mib") as refused:
            await read(parts(b"x" * 80))
        assert refused.value.status == 503 and bodies._all.num_bytes == 90
        with pytest.raises(Refused, match="more than 100 bytes"):
            await read(parts(b"x" * 101))
        rest.set()
        assert await slow == b"x" * 90 and bodies._all.num_bytes == 0
        assert await read(parts(b"x" * 80)) == b"x" * 80

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def held(bodies, client, *sizes):
    """Bodies of a client that wait for their answers; whether each was taken."""

    async def stream(size):
        yield b"x" * size

    async with contextlib.AsyncExitStack() as stack:
        taken = []
        for size in sizes:
            try:
                await stack.enter_async_context(bodies.read(stream(size), client))
                taken.append(True)
            except Refused as why:
                assert why.status == 503 and "--max-buffered-mib" in why.message
                taken.append(False)
        yield taken


def test_bodies_when_one_client_sends_many_large_ones_then_others_have_room_and_it_has_for_small_ones():
    async def scenario():
        bodies = Bodies(max_body_bytes=8 << 20, max_bytes=64 << 20, timeout_s=5.0)
        async with held(bodies, "a", *[4 << 20] * 9) as of_one, held(bodies, "a", *[SMALL_BYTES] * 9) as small:
            assert of_one == [True] * 7 + [False] * 2 and small == [True] * 4 + [False] * 5
            async with held(bodies, "b", *[4 << 20] * 7) as of_other, held(bodies, "c", 4 << 20, 4 << 20) as of_third:
                assert all(of_other) and of_third == [False] * 2, "an eighth is for small ones"
                async with held(bodies, "c", *[SMALL_BYTES] * 4) as small:
                    assert all(small)
        assert bodies._all.num_bytes == 0 and not bodies._of_clients
        async with held(bodies, "a", *[4 << 20] * 7) as of_one:
            assert all(of_one), "what has gone counts no more"

    asyncio.run(scenario())


def test_bodies_when_one_of_a_client_has_gone_then_those_that_are_under_way_still_count():
    async def scenario():
        bodies, goes_on = Bodies(max_body_bytes=4 << 20, max_bytes=16 << 20, timeout_s=5.0), asyncio.Event()

        async def later():
            await goes_on.wait()
            yield b"x" * (4 << 20)

        async def read():
            async with bodies.read(later(), "a"):
                await asyncio.Event().wait()

        first = asyncio.create_task(read())
        await asyncio.sleep(0)
        async with held(bodies, "a", 1):
            pass
        goes_on.set()
        await until(lambda: bodies._all.num_bytes)
        async with held(bodies, "a", 4 << 20) as taken:
            assert taken == [False], "seven eighths of its half"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert bodies._all.num_bytes == 0

    asyncio.run(scenario())


def test_body_when_tenants_share_an_address_then_each_has_its_own_part_of_the_room(tmp_path):
    keys = "\n".join(f'[{name}]\nkeys = ["sha256:{hashlib.sha256(name.encode()).hexdigest()}"]' for name in "ab")
    (tmp_path / "tenants").write_text(keys)
    (tmp_path / "tenants").chmod(0o600)
    secret = b"a secret of routers and servers"
    settings = {"tenants_file": str(tmp_path / "tenants"), "tenant_secret_file": "s", "tenant_secret": secret}

    async def scenario():
        server = FakeServer("a", banyan=True)
        server.banyan_state = {"tenants": TenantSecret(secret).name}
        async with running([server], max_body_mib=4, **settings) as rig:
            rig.router._bodies.max_bytes = 8 << 20
            server.gate.clear()

            async def ask(key):
                headers, body = {"x-api-key": key}, json.dumps({"text": "x" * (3 << 20)})
                async with rig.client.post(f"{rig.served.url}/generate", data=body, headers=headers) as response:
                    return response.status

            first = asyncio.create_task(ask("a"))
            await until(lambda: server.num_running)
            assert await ask("a") == 503
            other = asyncio.create_task(ask("b"))
            await until(lambda: server.num_running == 2)
            server.gate.set()
            assert await asyncio.gather(first, other) == [200, 200]

    asyncio.run(scenario())


HOSTILE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"host": "evil.example"},
    {"x-forwarded-for": "10.0.0.9"},
    {"forwarded": "for=10.0.0.9"},
]


@pytest.mark.parametrize("headers", HOSTILE)
def test_servers_when_another_page_or_a_proxy_asks_for_them_then_it_is_refused(headers):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            url = f"{rig.served.url}/router/servers"
            async with rig.client.get(url, headers=headers) as response:
                assert response.status == 403 and (await response.json())["error"]["type"] == "forbidden"
            for own in ({"origin": rig.served.url, "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
                async with rig.client.get(url, headers=own) as response:
                    assert response.status == 200

    asyncio.run(scenario())


def test_caches_when_a_page_asks_for_a_picture_there_then_nothing_is_flushed():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            picture = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
            async with rig.client.get(f"{rig.served.url}/flush_cache", headers=picture) as response:
                assert response.status == 403
            assert rig.num_seen() == [0]

    asyncio.run(scenario())


@pytest.mark.parametrize("headers", HOSTILE)
@pytest.mark.parametrize("path", ["/router/drain", "/router/resume"])
def test_drain_when_another_page_or_a_proxy_asks_for_it_then_it_is_refused(headers, path):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            url = f"{rig.served.url}{path}?server={rig.servers[0].url}"
            async with rig.client.post(url, headers=headers) as response:
                assert response.status == 403 and (await response.json())["error"]["type"] == "forbidden"
            assert not rig.router.fleet.servers[0].is_draining
            own = {"origin": rig.served.url}
            async with rig.client.post(url.replace("resume", "drain"), headers=own) as response:
                assert response.status == 200

    asyncio.run(scenario())


def test_headers_when_a_client_says_what_only_a_router_says_then_they_are_dropped():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            said = {SOURCE_HEADER: "a:1", READ_HEADER: "a:1 0", "X-Banyan-Later": "1", PLAN_HEADER: "compute", "a": "b"}
            url = f"{rig.served.url}/generate"
            async with rig.client.post(url, json={"text": "hi"}, headers=said) as response:
                assert response.status == 200
            arrived = rig.servers[0].seen[0][1]
            assert {name for name in arrived if name.startswith("x-banyan-")} == {PLAN_HEADER} and arrived["a"] == "b"

    asyncio.run(scenario())


def test_headers_when_they_come_in_several_lines_then_lists_are_whole_and_those_of_the_connection_stay_behind():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            lines = (
                *("tracestate: a=1", "X-Forwarded-For: 10.0.0.1", "cookie: a=1", "connection: close", "x-hop: 1"),
                *("content-type: application/json", "authorization: one", "x-data-parallel-rank: 0"),
                *("content-type: application/json", "authorization: two", "x-data-parallel-rank: 1"),
                *("tracestate: b=2", "x-forwarded-for: 10.0.0.2", "cookie: b=2", "connection: X-Hop", "x-one: 1"),
            )
            head = "\r\n".join(("POST /generate HTTP/1.1", "host: x", "content-length: 2", *lines))
            assert (await raw(rig.served.port, f"{head}\r\n\r\n{{}}".encode())).startswith(b"HTTP/1.1 200")
            ((_, seen),) = rig.servers[0].seen
            assert (seen["tracestate"], seen["x-forwarded-for"]) == ("a=1, b=2", "10.0.0.1, 10.0.0.2")
            assert (seen["cookie"], seen["x-one"], seen.get("x-hop")) == ("a=1; b=2", "1", None)
            first = (seen["content-type"], seen["authorization"], seen["x-data-parallel-rank"])
            assert first == ("application/json", "one", "0"), "what is no list is what a server would take"

    asyncio.run(scenario())


def test_event_when_it_never_ends_then_the_attempt_is_lost_and_nothing_is_kept():
    events = WholeEvents(max_bytes=1000)
    assert events.feed(b"data: 1\n\n" + b"x" * 900) == b"data: 1\n\n"
    with pytest.raises(TooLong):
        events.feed(b"x" * 200)

    async def scenario():
        class Answer:
            connection = None

            class content:
                @staticmethod
                async def readany():
                    return b"x" * 600

        attempt = Attempt(None, Answers(Bodies(max_body_bytes=1, max_bytes=1 << 20, timeout_s=1.0)), idle_timeout_s=1.0)
        attempt._response, attempt._events = Answer, WholeEvents(max_bytes=1000)
        with pytest.raises(Lost, match="more than 1000 bytes"):
            await attempt.read()

    asyncio.run(scenario())


def test_prompts_when_many_come_at_once_then_so_many_questions_are_asked_and_all_are_answered(monkeypatch):
    async def scenario():
        monkeypatch.setattr("banyan.router.tokens.MOST_ASKING", 2)
        server = FakeServer("a", events=True)
        async with running([server], tokenize_timeout_s=5.0) as rig:
            server.tokenises.clear()
            asked = [asyncio.create_task(rig.ask(text=f"hi {number}")) for number in range(6)]
            await until(lambda: len(server.seen) == 4)
            assert server.num_tokenising == 2
            server.tokenises.set()
            assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 6

    asyncio.run(scenario())


def test_prompt_when_its_tokens_would_not_come_in_time_then_no_server_is_held_up_by_the_question(monkeypatch):
    monkeypatch.setattr("banyan.router.tokens.MOST_ASKED_BYTES", 1000)

    async def scenario():
        server = FakeServer("a", events=True)
        async with running([server]) as rig:
            for size, num_asked in ((1001, 0), (1000, 0), (950, 1)):
                assert (await rig.ask(text="x" * size))[0] == 200
                assert server.num_tokenised == num_asked
            assert b"banyan_router_untokenised_total 2.0" in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1", "input": "x" * 2000}),
        ("/v1/responses", {"input": "x", "metadata": {"x": "x" * 2000}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "user": "x" * 2000}),
    ],
)
def test_prompt_when_what_stands_beside_its_text_is_long_then_no_server_is_held_up_by_the_question(
    path, fields, monkeypatch
):
    monkeypatch.setattr("banyan.router.tokens.MOST_ASKED_BYTES", 1000)

    async def scenario():
        server = FakeServer("a", events=True, banyan=True)
        server.says["/v1/responses"] = (200, "application/json", b'{"id": "resp_1"}')
        async with running([server]) as rig:
            await rig.ask("/v1/responses", input="hello")
            assert server.num_tokenised == 1
            assert (await rig.ask(path, **fields))[0] == 200
            assert server.num_tokenised == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("apart", [{"lora_path": "adapter"}, {"extra_key": "k"}, {"model": "m:adapter"}])
def test_prompt_when_events_could_not_be_compared_with_its_tokens_then_no_server_is_asked_for_them(apart):
    async def scenario():
        server = FakeServer("a", events=True)
        server.more_info = {"served_model_name": "org/m:8b"}
        async with running([server]) as rig:
            assert (await rig.ask("/v1/completions", prompt="hi", **apart))[0] == 200
            assert server.num_tokenised == 0
            assert b"banyan_router_untokenised_total 1.0" in (await rig.get("/metrics"))[1]
            assert (await rig.ask("/v1/completions", prompt="hi", model="org/m:8b"))[0] == 200
            assert server.num_tokenised == 1

    asyncio.run(scenario())


def test_prompt_when_it_would_only_be_refused_then_no_server_is_asked_for_its_tokens():
    async def scenario():
        server = FakeServer("a", events=True)
        async with running([server], max_in_flight=1, max_waiting=1) as rig:
            server.gate.clear()
            held = [asyncio.create_task(rig.ask(text="hi")) for _ in range(2)]
            await until(lambda: rig.router.forwarder.admission.num_waiting == 1)
            before = server.num_tokenised
            assert (await rig.ask(text="hi"))[0] == 429
            assert server.num_tokenised == before
            server.gate.set()
            await asyncio.gather(*held)

    asyncio.run(scenario())
