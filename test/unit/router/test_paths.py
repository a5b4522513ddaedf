# SPDX-License-Identifier: Apache-2.0
"""Every path of SGLang's, as a client of the router sees it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from test.unit.router.fake_pair import FakeDecode, FakePrefill, Rooms
from test.unit.router.fake_server import BLOCK_TOKENS, FakeServer, raw, running, until

from banyan.router.blocks import block_ids, pack
from banyan.router.events import BlockStored
from banyan.router.health import State
from banyan.router.held_responses import HeldResponses
from banyan.router.paths import BY_PATH, ROWS
from banyan.router.prompt import opened_session
from banyan.router.upstream import at

PROMPT = "a prompt of some length, long enough for pages"
SSE, LINES = "text/event-stream", "application/x-ndjson"


def test_table_when_read_then_each_path_stands_there_once():
    assert len(BY_PATH) == len(ROWS)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/a/b"),
        ("GET", "/of-a-later-release?x=1"),
        ("PUT", "/v1/rerank"),
        ("HEAD", "/v1/rerank"),
        ("OPTIONS", "/generate"),
    ],
)
def test_path_when_any_server_can_answer_it_then_one_does_and_its_answer_comes_as_it_was(method, path):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"]) as rig:
            for server in rig.servers:
                server.says[path.partition("?")[0]] = (207, "text/x-odd", b"as it ", b"was")
            async with rig.client.request(method, rig.served.url + path) as response:
                assert (response.status, response.content_type, await response.read()) == (
                    207,
                    "text/x-odd",
                    b"" if method == "HEAD" else b"as it was",
                )
                assert response.headers["x-said-by"] in "ab" and response.headers["x-asked-by"] == method
            assert sorted(rig.num_seen()) == [0, 1]
            row = BY_PATH.get(path)
            label = row.path if row is not None else "/v1/models/{model:path}" if "models" in path else "other"
            label = "other" if method in ("HEAD", "OPTIONS") else label
            assert f'placed_by_load_total{{path="{label}"}} 1.0'.encode() in (await rig.get("/metrics"))[1]
            rig.assert_idle()

    asyncio.run(scenario())


def test_body_when_it_is_compressed_then_it_arrives_as_it_was_and_its_session_is_the_headers():
    async def scenario():
        async with running([FakeServer(name) for name in "ab"], policy="session_sticky") as rig:
            body, headers = b"\x28\xb5\x2f\xfd\x00", {"x-body-compressed": "zstd", "x-session-id": "s"}
            for _ in range(3):
                async with rig.client.post(f"{rig.served.url}/v1/messages", data=body, headers=headers):
                    pass
            assert sorted(rig.num_seen()) == [0, 3]
            seen = [one for server in rig.servers for one in server.seen]
            assert all(one[0] == body and one[1]["x-body-compressed"] == "zstd" for one in seen)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said",
    [
        {"prompt_cache_key": "k"},
        {"metadata": {"user_id": "u"}},
        {"conversation": "c"},
        {"conversation": {"id": "c"}},
        {"session_id": "s"},
    ],
)
def test_session_when_a_client_names_it_by_the_way_then_its_requests_stay_together(said):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"], policy="session_sticky") as rig:
            for turn in range(4):
                await rig.ask("/v1/responses", input=f"{turn}", **said)
                await rig.ask("/v1/responses", input="of nobody")
            counts = [sum(b"nobody" not in body for body, _ in server.seen) for server in rig.servers]
            assert sorted(counts) == [0, 4]

    asyncio.run(scenario())


REFUSED = (503, "application/json", b'{"success": false}')


@pytest.mark.parametrize(("refuses", "answers"), [([], "a"), ([1], "b"), ([0, 1], "a")])
def test_flush_when_asked_for_then_every_server_flushes_and_a_refusal_is_the_answer(refuses, answers):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"]) as rig:
            for server in rig.servers:
                server.says["/flush_cache"] = (200, "text/plain", b"flushed")
            for number in refuses:
                rig.servers[number].says["/flush_cache"] = REFUSED
            async with rig.client.post(f"{rig.served.url}/flush_cache?timeout=1") as response:
                assert (response.status, response.headers["x-said-by"]) == (503 if refuses else 200, answers)
            assert rig.num_seen() == [1, 1]

    asyncio.run(scenario())


def test_flush_when_a_server_is_down_then_that_is_the_answer():
    async def scenario():
        async with running([FakeServer(name) for name in "ab"]) as rig:
            await rig.servers[1].kill()
            status, _, body = await rig.ask("/flush_cache")
            assert status == 502 and rig.servers[1].url.encode() in body

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "status"), [("/flush_cache", 403), ("/load_lora_adapter", 403), ("/abort_request", 200)]
)
def test_servers_when_somebody_else_would_change_them_then_they_are_not_asked(path, status):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            headers = {"x-forwarded-for": "10.0.0.1"}
            async with rig.client.post(rig.served.url + path, json={"rid": "1"}, headers=headers) as response:
                assert response.status == status
            assert rig.num_seen() == [int(status == 200)]

    asyncio.run(scenario())


OTHERWISE = (
    *("/%66lush_cache", "/%2566lush_cache", "/x/../flush_cache", "/./flush_cache", "//flush_cache", "/a%2Fb?c=%2f"),
    *("/flush_cache#", "/flush_cache#a?b", "/flush_cache%23", "/flush_cache%3Fa", "/flush_cache;a", "/flush_cache/"),
    *("/FLUSH_CACHE", "\\flush_cache", "/x\\..\\flush_cache", "/x?a#b?c", "/flush_cache%0A", "/flush_cach%C3%A9"),
    *("http://a/flush_cache", "a@b/flush_cache", "*", "?/flush_cache", "%2Fflush_cache", "%2f@b/flush_cache"),
)
"""Ways to write a path that only this machine may ask for, or one that is nearly it."""


@pytest.mark.parametrize("path", OTHERWISE)
def test_path_when_it_is_written_otherwise_then_the_router_and_the_servers_read_the_same(path):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].says["/flush_cache"] = (200, "text/plain", b"flushed")
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.served.port)
            writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\nx-forwarded-for: b\r\ncontent-length: 0\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            writer.close()
            if path in ("/%66lush_cache", "/flush_cache%0A"):
                assert b" 403 " in head
            elif path.startswith("/") and not path.startswith("//"):
                assert json.loads(body)["raw"] == path.replace("#", "%23")
            else:
                assert b" 400 " in head
            assert rig.num_seen() == [int(b" 200 " in head)]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "line", ["%2F@HERE/flush_cache", "@HERE/flush_cache", "%2Fv1%2Fresponses%2Fx@HERE/flush_cache"]
)
@pytest.mark.parametrize("servers", ["a", "ab"])
def test_path_when_it_would_be_another_host_behind_a_servers_address_then_nobody_is_asked(line, servers):
    async def scenario():
        elsewhere = FakeServer("elsewhere")
        await elsewhere.start()
        async with running([FakeServer(name) for name in servers]) as rig:
            for host in (f"127.0.0.1:{elsewhere.port}", f"127.0.0.1:{rig.servers[0].port}"):
                head = f"GET {line.replace('HERE', host)} HTTP/1.1\r\nhost: a\r\nx-forwarded-for: b\r\n"
                answer = await raw(rig.served.port, f"{head}connection: close\r\n\r\n".encode())
                assert answer.startswith(b"HTTP/1.1 400")
            assert not any(rig.num_seen()) and not elsewhere.seen
        await elsewhere.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("target", ["@b:1/x", "%2F@b:1/x", "x@a:1/x", ".b/x", "0/x", "", "?x", "#x"])
def test_target_when_it_would_lead_elsewhere_than_to_the_server_then_nobody_is_asked(target):
    with pytest.raises(ValueError):
        at("http://a:1", target)
    assert str(at("http://a:1", f"/{target}")).startswith("http://a:1/")


@pytest.mark.parametrize(
    ("path", "statuses", "chosen"),
    [
        ("/close_session", [404, 200], 1),
        ("/close_session", [404, 500], 0),
        ("/abort_request", [200, 503], 1),
        ("/abort_request", [200, 200], 0),
    ],
)
def test_answer_when_all_have_answered_then_one_counts(path, statuses, chosen):
    async def scenario():
        servers = [FakeServer(name) for name in "ab"]
        for server, status in zip(servers, statuses, strict=True):
            server.says[path] = (status, "text/plain", server.name.encode())
        async with running(servers) as rig:
            status, _, body = await rig.ask(path)
            assert (status, body) == (statuses[chosen], "ab"[chosen].encode())

    asyncio.run(scenario())


def test_response_when_a_server_hangs_then_the_one_that_has_it_answers_and_the_other_was_asked():
    async def scenario():
        a, b = (FakeServer(name) for name in "ab")
        async with running([a, b]) as rig:
            a.says["/v1/responses/x"] = (200, "application/json", asyncio.Event())
            b.says["/v1/responses/x"] = (200, "application/json", b"{}")
            assert await rig.get("/v1/responses/x") == (200, b"{}")
            await until(lambda: a.seen)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/responses/x/cancel", "/abort_request"])
def test_servers_when_one_that_is_down_hangs_then_it_is_waited_for_no_longer_than_for_a_probe(path):
    async def scenario():
        a, b = (FakeServer(name) for name in "ab")
        async with running([a, b]) as rig:
            a.says[path] = (200 if path == "/abort_request" else 404, "application/json", b"{}")
            b.says[path] = (200, "application/json", asyncio.Event())
            b.awake.clear()
            await until(lambda: rig.state(1) is State.DOWN)
            assert (await rig.ask(path))[0] == (502 if path == "/abort_request" else 404)

    asyncio.run(scenario())


def test_servers_when_one_falls_silent_then_it_is_waited_for_only_where_it_is_to_be_changed():
    async def scenario():
        a, b = (FakeServer(name) for name in "ab")
        async with running([a, b]) as rig:
            goes_on = asyncio.Event()
            b.says = {path: (200, "text/plain", goes_on) for path in ("/abort_request", "/flush_cache")}
            abort, flush = (asyncio.create_task(rig.ask(path)) for path in b.says)
            await until(lambda: len(b.seen) == 2)
            b.awake.clear()
            status, _, body = await abort
            assert status == 502 and b"did not answer" in body and rig.state(1) is State.DOWN
            goes_on.set()
            assert (await flush)[0] == 200
            rig.assert_idle()

    asyncio.run(scenario())


def test_request_to_all_servers_when_one_sends_it_elsewhere_then_that_is_the_answer():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            (a,) = rig.servers
            a.says["/flush_cache"], a.more_headers = (307, "text/plain", b""), {"location": "/elsewhere"}
            async with rig.client.post(f"{rig.served.url}/flush_cache", allow_redirects=False) as response:
                assert (response.status, response.headers["location"]) == (307, "/elsewhere")
            assert rig.num_seen() == [1]

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [row.path for row in ROWS if row.empties])
def test_caches_when_they_were_emptied_then_nothing_that_was_sent_is_expected_there(path):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"]) as rig:
            for _ in range(2):
                await rig.ask(text="x" * 3000)
            targets = rig.router.fleet.targets
            assert all(len(target.sent) for target in targets)
            rig.servers[1].says[path] = REFUSED
            assert (await rig.ask(path))[0] == 503
            assert not any(len(target.sent) for target in targets)

    asyncio.run(scenario())


def test_cookie_when_a_server_sets_one_then_it_is_its_clients_alone():
    async def scenario():
        a = FakeServer("a")
        await a.start()
        local = f"http://localhost:{a.port}"
        async with running([FakeServer("b")], is_up=False, instead={"servers": (local,)}) as rig:
            a.says["/docs"] = (200, "text/plain", b"x")
            await until(lambda: rig.router.all_servers[0].takes_requests)
            for headers in ({}, {}, {"cookie": "mine=1"}):
                async with rig.client.get(f"{rig.served.url}/docs", headers=headers) as response:
                    assert response.headers["set-cookie"] == "said-by=a"
            assert [headers.get("cookie") for _, headers in a.seen] == [None, None, "mine=1"]
        await a.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("policy", ["session_sticky", "unified"])
def test_session_when_its_server_has_named_it_then_its_requests_go_there(policy):
    async def scenario():
        async with running([FakeServer(name) for name in "abc"], policy=policy) as rig:
            for server in rig.servers:
                server.says["/open_session"] = (200, "application/json", f'"session-{server.name}"'.encode())
            opened = [json.loads((await rig.ask("/open_session", capacity_of_str_len=10))[2]) for _ in range(9)]
            assert len(set(opened)) > 1
            for session in opened:
                said = (await rig.ask(text="hi", session_params={"id": session}))[2]
                assert session == f"session-{json.loads(said)['text']}"

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"", b"{}", b'""', b'"\xff"', b"[" * 4000, b'"' + b"x" * 5000 + b'"'])
def test_session_when_an_answer_names_none_then_none_is_known(answer):
    assert opened_session(answer) is None


@pytest.mark.parametrize("stream", [True, False])
def test_response_when_a_client_goes_on_from_it_then_that_is_where_it_was_made(stream):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"]) as rig:
            for server in rig.servers:
                said = f'{{"id": "resp_{server.name}", "output": []}}'
                event = f'event: response.created\ndata: {{"type": "response.created", "response": {said}}}\n\n'
                pieces = (SSE, event.encode(), b"data: more\n\n") if stream else ("application/json", said.encode())
                server.says["/v1/responses"] = (200, *pieces)
                server.says[f"/v1/responses/resp_{server.name}"] = (200, "application/json", said.encode())
                other = "b" if server.name == "a" else "a"
                server.says[f"/v1/responses/resp_{other}"] = (404, "application/json", b"{}")
            for _ in range(2):
                assert (await rig.ask("/v1/responses", input="hello", stream=stream))[0] == 200
            for number in (1, 0, 1, 1):
                name, before = rig.servers[number].name, rig.num_seen()
                await rig.ask("/v1/responses", input="and", stream=stream, previous_response_id=f"resp_{name}")
                assert rig.num_seen()[number] == before[number] + 1
                assert (await rig.get(f"/v1/responses/resp_{name}"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("away", ["drained", "killed"])
def test_response_when_the_server_that_has_it_takes_no_requests_then_who_goes_on_from_it_waits_for_it(away):
    async def scenario():
        async with running([FakeServer(name) for name in "ab"], queue_timeout_s=0.3) as rig:
            for server in rig.servers:
                server.says["/v1/responses"] = (200, "application/json", b'{"id": "resp_1"}')
            await rig.ask("/v1/responses", input="hello")
            (home,) = (server for server in rig.servers if server.seen)
            (known,) = (server for server in rig.router.fleet.servers if server.url == home.url)
            if away == "drained":
                await rig.post(f"/router/drain?server={home.url}")
            else:
                await home.kill()
                await until(lambda: not known.takes_requests)
            follow = {"input": "and", "previous_response_id": "resp_1"}
            assert (await rig.ask("/v1/responses", **follow))[0] == 503
            # Time enough for a machine that does other things.
            forwarder = rig.router.forwarder
            forwarder._settings = replace(forwarder._settings, queue_timeout_s=30.0)
            waiting = asyncio.create_task(rig.ask("/v1/responses", **follow))
            await until(lambda: rig.router.forwarder.admission.num_waiting)
            if away == "drained":
                await rig.post(f"/router/resume?server={home.url}")
            else:
                await home.come_back()
            assert (await waiting)[0] == 200
            assert len(home.seen) == 2 and sorted(rig.num_seen()) == [0, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize(("fields", "num_held"), [({}, 1), ({"store": True}, 1), ({"store": False}, 0)])
def test_response_when_no_server_keeps_it_then_the_router_does_not_remember_it(fields, num_held):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].says["/v1/responses"] = (200, "application/json", b'{"id": "resp_1"}')
            assert (await rig.ask("/v1/responses", input="hello", **fields))[0] == 200
            assert len(rig.router.responses) == num_held

    asyncio.run(scenario())


def test_responses_when_one_tenant_makes_very_many_then_those_of_others_are_known_all_the_same():
    held = HeldResponses(max_held=4)
    for number, owner in enumerate("abbbbbb"):
        held.made(b'{"id": "resp_%d"}' % number, "http://x", owner)
    assert [number for number in range(7) if held.holder(f"resp_{number}", "b")] == [4, 5, 6]
    assert held.holder("resp_0", "a") == "http://x" and held.holder("resp_6", "a") is None and len(held) == 4


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ((429, "application/json", b"{}"), 429),
        ((503, "application/json", b"{}"), 503),
        ((200, "application/json", b"{", ConnectionResetError()), 502),
    ],
)
def test_response_when_the_server_that_has_it_does_not_answer_then_none_is_asked_that_knows_nothing_of_it(said, status):
    async def scenario():
        async with running([FakeServer(name) for name in "abc"]) as rig:
            for server in rig.servers:
                server.says["/v1/responses"] = (200, "application/json", b'{"id": "resp_1"}')
            await rig.ask("/v1/responses", input="hello")
            (home,) = (server for server in rig.servers if server.seen)
            for server in rig.servers:
                server.says["/v1/responses"] = said if server is home else (404, "application/json", b"{}")
            assert (await rig.ask("/v1/responses", input="and", previous_response_id="resp_1"))[0] == status
            assert sorted(rig.num_seen()) == [0, 0, 3]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "kind", "first", "check"),
    [
        ("/v1/messages", SSE, b"event: message_start\ndata: {}\n\n", lambda said: said["error"]["type"] == "api_error"),
        ("/v1/responses", SSE, b"event: response.created\ndata: {}\n\n", lambda said: said["code"] == "server_lost"),
        ("/v1/chat/completions", SSE, b"data: {}\n\n", lambda said: said["error"]["type"] == "server_lost"),
        ("/api/chat", LINES, b'{"done": false}\n', lambda said: isinstance(said["error"], str)),
    ],
)
def test_stream_when_it_breaks_then_its_last_event_has_the_form_that_clients_of_that_path_read(
    path, kind, first, check
):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].says[path] = (200, kind, first, b"half of an ev", ConnectionResetError())
            status, headers, body = await rig.ask(path, messages=[], input="x", stream=True)
            assert (status, headers["content-type"].partition(";")[0]) == (200, kind) and body.startswith(first)
            last = body[len(first) :].decode()
            named = kind == SSE and path != "/v1/chat/completions"
            assert last.startswith("event: error\ndata: ") if named else "event:" not in last
            assert check(json.loads(last[last.index("{") :]))

    asyncio.run(scenario())


def test_lines_when_one_is_there_then_it_is_passed_on_before_the_answer_ends():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].says["/api/generate"] = (200, LINES, b'{"a": 1}\n{"b"', b": 2}\n", *[b"{}\n"] * 100)
            async with rig.client.post(f"{rig.served.url}/api/generate", json={"prompt": "x"}) as response:
                assert await response.content.readline() == b'{"a": 1}\n'
                assert rig.router.fleet.servers[0].in_flight
                assert (await response.read()).startswith(b'{"b": 2}\n')

    asyncio.run(scenario())


def test_errors_when_the_router_gives_them_then_in_the_form_of_the_path():
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.router.is_stopping = True
            _, _, body = await rig.ask("/v1/messages", messages=[])
            assert json.loads(body) == {
                "type": "error",
                "error": {"type": "overloaded_error", "message": "the router is stopping"},
            }
            assert json.loads((await rig.ask("/api/chat"))[2]) == {"error": "the router is stopping"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "system": "s"}),
        ("/v1/responses", {"input": PROMPT}),
        ("/api/chat", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
@pytest.mark.parametrize("banyan", [True, False])
def test_request_when_a_server_makes_a_chat_of_it_then_one_with_banyan_tells_the_tokens_and_no_other_is_asked(
    path, fields, banyan
):
    async def scenario():
        servers = [FakeServer(name, events=True, banyan=banyan) for name in "abc"]
        async with running(servers, policy="lmetric") as rig:
            blocks = list(block_ids(pack(list(PROMPT.encode())), BLOCK_TOKENS))
            await servers[2].publishers[0].send(BlockStored(blocks))
            await until(lambda: len(rig.router.fleet.servers[2].feeds[0].blocks))
            for _ in range(3):
                assert (await rig.ask(path, **fields))[0] == 200
            asked = sum(server.num_tokenised for server in servers)
            _, metrics = await rig.get("/metrics")
            if banyan:
                assert rig.num_seen() == [0, 0, 3] and asked == 3
                assert f"cached_tokens_total {3 * len(blocks) * BLOCK_TOKENS}.0".encode() in metrics
            else:
                assert asked == 0 and b"banyan_router_untokenised_total 3.0" in metrics

    asyncio.run(scenario())


def test_pair_when_a_path_needs_none_then_a_decode_server_answers_and_what_it_cannot_do_is_refused():
    async def scenario():
        rooms = Rooms()
        prefill, decode = FakePrefill("p", rooms), FakeDecode("d", rooms)
        async with running([prefill, decode]) as rig:
            assert json.loads((await rig.ask("/v1/tokenize", prompt="x"))[2])["by"] == "d"
            assert (await rig.ask("/v1/embeddings", input="x"))[0] == 404
            assert (await rig.ask("/api/chat", messages=[]))[0] == 404
            rig.assert_idle()

    asyncio.run(scenario())
