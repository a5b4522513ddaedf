# SPDX-License-Identifier: Apache-2.0
"""Bodies that are large or deep: they are read beside the loop, or passed on unread."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import msgspec
import pytest
from test.unit.router.fake_server import BLOCK_TOKENS, FakeServer, running, until

from banyan.router import app, asked_prompt, dropped_lines, prompt, turns
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import block_ids, pack
from banyan.router.chats import MEDIUM_BYTES, MOST_MEDIA
from banyan.router.description import Description
from banyan.router.events import BlockStored
from banyan.router.fleet import Fleet, Server
from banyan.router.health import Health
from banyan.router.paths import BY_PATH, CHAT_COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from banyan.routing import POLICIES, Dispatcher

DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000


@pytest.mark.parametrize("body", [DEEP, b'{"text": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_body_when_it_is_too_deep_to_read_then_it_is_the_servers_to_refuse_and_the_connection_goes_on(body):
    async def scenario():
        async with running([FakeServer("a")]) as rig:
            rig.servers[0].status = 400
            for _ in range(2):
                async with rig.client.post(f"{rig.served.url}/v1/chat/completions", data=body) as response:
                    assert response.status == 400 and "says 400" in await response.text()
            assert rig.servers[0].seen[0][0] == body

    asyncio.run(scenario())


IMAGE = {"type": "image", "source": "DEEP"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"messages": [{"content": [IMAGE]}]}),
        (MESSAGES, {"messages": [{"content": [{"type": "tool_result", "content": [IMAGE]}]}]}),
        (RESPONSES, {"input": [{"content": [{"type": "input_image", "image_url": "DEEP"}]}]}),
        (MESSAGES, {"messages": [{"content": "hi"}], "metadata": "DEEP"}),
    ],
)
def test_body_when_it_is_only_just_not_too_deep_to_be_read_then_it_is_the_servers_to_refuse(path, fields):
    async def scenario():
        async with running([FakeServer("a", events=True, banyan=True)]) as rig:
            rig.servers[0].status = 400
            for depth in range(850, 1010):
                deep = '{"a":' * depth + "1" + "}" * depth
                body = json.dumps(fields).replace('"DEEP"', deep)
                async with rig.client.post(rig.served.url + path, data=body) as response:
                    assert response.status < 500, depth

    asyncio.run(scenario())


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": [{"b": [{"c": {}}]}] * 20}}}
AGENTS = {
    "text": {"text": "[{" * 200_000},
    "escaped": {"text": '"[{\\' * 100_000},
    "commas": {"text": 'a,,,b\\"' * 500_000},
    "turns": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 1000, "tools": [TOOL] * 100},
}


@pytest.mark.parametrize("body", AGENTS.values(), ids=AGENTS)
def test_body_when_its_text_or_its_turns_have_many_brackets_then_it_is_read(body):
    path = CHAT_COMPLETIONS if "messages" in body else GENERATE
    read = prompt.read(path, json.dumps(body).encode(), {})
    assert read.text is not None and len(read.text) > 50_000 and read.tokenize is not None


MUCH = {
    "lists": b'{"text": "hi", "more": [' + b"[[]]," * 100_000 + b"1]}",
    "behind strings": b'{"text": "hi", "\\"": "\\\\", "more": [' + b'["",{}],' * 70_000 + b"1]}",
    "strings": b'{"text": "hi", "more": [' + b'"",' * 600_000 + b"1]}",
    "numbers": b'{"text": "hi", "extra_key": [' + b"1," * 1_400_000 + b"1]}",
}


@pytest.mark.parametrize("body", MUCH.values(), ids=MUCH)
def test_body_when_all_would_wait_while_it_is_read_then_it_is_passed_on_unread(body, monkeypatch):
    json.loads(body)
    monkeypatch.setattr(prompt, "json_of", lambda body: pytest.fail("it was read"))
    monkeypatch.setattr(dropped_lines, "decoded", lambda *args: pytest.fail("it was read"))
    assert not prompt.read(GENERATE, body, {}).is_read
    assert dropped_lines.DroppedLines(re.compile("hi")).without(BY_PATH[CHAT_COMPLETIONS], body) is body

    async def scenario():
        async with running([FakeServer("a")]) as rig:
            async with rig.client.post(f"{rig.served.url}/generate", data=body) as response:
                assert response.status == 200
            assert rig.servers[0].seen[0][0] == body

    asyncio.run(scenario())


def test_body_when_its_client_goes_before_its_turn_to_be_read_then_nothing_of_it_is_kept(monkeypatch):
    goes_on, read_of = threading.Event(), prompt.read

    def wait(*args):
        goes_on.wait()
        return read_of(*args)

    async def scenario():
        monkeypatch.setattr(prompt, "read", wait)
        async with running([FakeServer("a")]) as rig:
            router = rig.router
            try:
                for _ in range(3):
                    asked = asyncio.create_task(rig.ask(text="x" * (1 << 20)))
                    await until(lambda: router._bodies._all.num_bytes > 1 << 20)
                    await asyncio.sleep(0.05)
                    asked.cancel()
                    await until(lambda: router._bodies._all.num_bytes == 0)
                    # One is being read, which cannot be ended.
                    await until(lambda: not router._turns._thread._work_queue.qsize())
            finally:
                goes_on.set()
            assert (await rig.ask(text="x" * (1 << 20)))[0] == 200

    asyncio.run(scenario())


def test_body_when_many_large_ones_wait_to_be_read_then_the_next_is_passed_on_and_a_response_is_refused(monkeypatch):
    goes_on, read_of = threading.Event(), prompt.read
    monkeypatch.setattr(turns, "MOST_BYTES", 4 << 20)

    def wait(path, body, *args):
        if body:
            goes_on.wait()
        return read_of(path, body, *args)

    async def scenario():
        monkeypatch.setattr(prompt, "read", wait)
        async with running([FakeServer("a")]) as rig:
            try:
                # One is being read, and two wait.
                waiting = [asyncio.create_task(rig.ask(text="x" * (1 << 20))) for _ in range(3)]
                await until(lambda: rig.router._turns._waiting_bytes.total() > 2 << 20)
                assert (await rig.ask(text="y" * (1 << 20)))[0] == 200 and rig.num_seen() == [1]
                status, headers, body = await rig.ask("/v1/responses", input="y" * (1 << 20))
                assert status == 503 and "retry-after" in headers and b"wait to be read" in body
            finally:
                goes_on.set()
            assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 3
            assert not rig.router._turns._waiting_bytes

    asyncio.run(scenario())


def test_turns_when_one_client_has_half_of_those_that_wait_then_others_have_room(monkeypatch):
    monkeypatch.setattr(turns, "MOST_BYTES", 100)

    async def scenario():
        taken, goes_on = turns.Turns(), threading.Event()
        going = [asyncio.create_task(taken.take(client, 50, goes_on.wait)) for client in "aa"]
        await until(lambda: taken._waiting_bytes.total() == 50)
        assert (taken.has_room("a"), taken.has_room("b")) == (False, True)
        going.append(asyncio.create_task(taken.take("b", 50, goes_on.wait)))
        await until(lambda: taken._waiting_bytes.total() == 100)
        assert not taken.has_room("c")
        goes_on.set()
        await asyncio.gather(*going)
        assert taken.has_room("a")

    asyncio.run(scenario())


def test_turns_when_the_system_has_no_thread_left_then_everybody_has_a_turn_all_the_same(monkeypatch):
    async def scenario():
        def fails(thread):
            raise RuntimeError("can't start new thread")

        taken = turns.Turns()
        monkeypatch.setattr(threading.Thread, "start", fails)
        async with asyncio.timeout(5):
            assert [await taken.take("a", 1, str, number) for number in range(2)] == ["0", "1"]

    asyncio.run(scenario())


@pytest.mark.parametrize("events", [True, False])
def test_body_when_it_has_been_read_then_the_question_for_its_tokens_is_not_kept(events):
    async def scenario():
        async with running([FakeServer("a", events=events)], max_in_flight=1, max_waiting=1) as rig:
            kept = []
            forward = rig.router.forwarder.forward
            rig.router.forwarder.forward = lambda call, asked: kept.append(asked) or forward(call, asked)
            rig.servers[0].gate.clear()
            # The last is refused.
            going = [asyncio.create_task(rig.ask(text="hi"))]
            await until(lambda: rig.servers[0].num_running)
            going.append(asyncio.create_task(rig.ask(text="hi")))
            await until(lambda: rig.router.forwarder.admission.num_waiting)
            assert (await rig.ask(text="hi"))[0] == 429
            rig.servers[0].gate.set()
            await asyncio.gather(*going)
        assert [asked.request.tokenize for asked in kept] == [None] * 3
        assert [asked.request.text for asked in kept] == [b"hi"] * 3

    asyncio.run(scenario())


def test_body_when_it_is_large_then_it_is_read_beside_the_loop_and_when_it_is_larger_it_is_not(monkeypatch):
    body = json.dumps({"input_ids": [7] * 1000, "session_id": "s"}).encode()
    read = prompt.read(GENERATE, body, {})
    assert len(read.token_ids) == 1000 and read.session == "s"
    monkeypatch.setattr(prompt, "MOST_READ_BYTES", 1000)
    unread = prompt.read(GENERATE, body, {prompt.ROUTING_KEY_HEADER: "r"})
    assert unread.token_ids is None and unread.session == "r" and not unread.may_pin

    readers, read_of = [], prompt.read

    def told(*args):
        readers.append(threading.current_thread())
        return read_of(*args)

    async def scenario():
        monkeypatch.setattr(prompt, "read", told)
        async with running([FakeServer("a"), FakeServer("b")]) as rig:
            for fields in (
                *({"input_ids": [7] * 200_000}, {"text": "[" * 10_000}, {"text": "," * 20_000}),
                {"input_ids": [7] * 10},
            ):
                assert (await rig.ask(**fields))[0] == 200
        *beside, on = readers
        assert all(thread.name.startswith("banyan-read-prompt") for thread in beside)
        assert on is threading.current_thread()

    asyncio.run(scenario())


def test_prompt_when_it_is_long_then_the_question_for_its_tokens_is_written_beside_the_loop(monkeypatch):
    writers, encode = [], msgspec.json.encode

    def told(what):
        writers.append(threading.current_thread())
        return encode(what)

    async def scenario():
        async with running([FakeServer("a", events=True)], tokenize_timeout_s=5.0) as rig:
            monkeypatch.setattr(msgspec.json, "encode", told)
            for num_chars in (app.LARGE_BYTES, 10):
                await rig.ask(text="x" * num_chars)
            monkeypatch.undo()
            assert rig.servers[0].num_tokenised == 2

    asyncio.run(scenario())
    assert [writer is threading.main_thread() for writer in writers] == [False, True]


def test_body_when_its_size_says_that_it_is_large_then_it_is_not_looked_through_on_the_loop(monkeypatch):
    for count in ("num_brackets", "num_commas"):
        monkeypatch.setattr(prompt, count, lambda body: pytest.fail("it was looked through"))
    assert app._is_large(b"x" * app.LARGE_BYTES)


def test_prompt_when_it_is_long_and_held_then_its_blocks_are_hashed_beside_the_loop(monkeypatch):
    threads = []

    def told(*args):
        threads.append(threading.current_thread().name)
        return block_ids(*args)

    async def scenario():
        monkeypatch.setattr(asked_prompt, "block_ids", told)
        server, tokens = FakeServer("a", events=True), [7] * 200_000
        async with running([server]) as rig:
            await server.publishers[0].send(BlockStored(list(block_ids(pack(tokens), BLOCK_TOKENS))))
            await until(lambda: len(rig.router.fleet.servers[0].feeds[0].blocks))
            assert (await rig.ask(input_ids=tokens))[0] == 200
            assert b"cached_tokens_total 199996.0" in (await rig.get("/metrics"))[1]

    asyncio.run(scenario())
    (thread,) = threads
    assert thread.startswith("banyan-read-prompt")


def test_prompt_when_it_is_of_all_that_is_read_then_it_does_not_push_others_out_of_what_was_sent():
    made = Fleet([Server("http://a", Health(3))], Dispatcher(0, POLICIES["lmetric"]()), max_in_flight=9)
    (server,) = made.servers
    made.described(server, Description())
    server.health.came_up()
    other, longest = Asked(prompt.Request(text=b"x" * 3000)), Asked(prompt.Request(text=b"y" * prompt.MOST_READ_BYTES))
    for asked in (other, longest):
        made.take(asked)
    assert made.cached_tokens(other) == [704]


PARTS = {
    "image_url": (CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": "PARTS"}]}, {"type": "x"}),
    "messages": (MESSAGES, {"messages": [{"role": "user", "content": "PARTS"}]}, {"type": "image"}),
    "results": (
        MESSAGES,
        {"messages": [{"content": [{"type": "tool_result", "content": "PARTS"}]}]},
        {"type": "image"},
    ),
    "responses": (RESPONSES, {"input": "PARTS"}, {"type": "input_file"}),
}


@pytest.mark.parametrize(("path", "fields", "part"), PARTS.values(), ids=PARTS)
def test_chat_when_it_has_more_media_than_are_compared_then_the_others_count_and_are_not_in_the_text(
    path, fields, part
):
    def ask(num_parts):
        body = json.dumps(fields).replace('"PARTS"', json.dumps([part] * num_parts))
        return Asked(prompt.read(path, body.encode(), {}))

    few, more, many = map(ask, (MOST_MEDIA // 2, 2 * MOST_MEDIA, 20 * MOST_MEDIA))
    assert len(many.request.text) < 3 << 20 and many.request.text.startswith(more.request.text[: 1 << 20])
    assert few.request.num_more_bytes == 0 and few.request.tokenize is None and many.request.tokenize is None
    one = MEDIUM_BYTES / 4
    assert MOST_MEDIA * one * 1.5 == pytest.approx(more.num_tokens - few.num_tokens, rel=0.01)
    assert 18 * MOST_MEDIA * one == pytest.approx(many.num_tokens - more.num_tokens, rel=0.01)


def test_chat_when_its_parts_are_no_objects_then_they_are_text_as_they_are():
    body = json.dumps({"messages": [{"role": "user", "content": [1] * 10_000}]})
    assert len(prompt.read(CHAT_COMPLETIONS, body.encode(), {}).text) < len(body)


def test_name_of_an_adapter_when_it_is_long_then_a_hash_stands_for_it():
    said = {"model": f"m:{'x' * 300}", "prompt": "hi"}
    assert len(prompt.read("/v1/completions", json.dumps(said).encode(), {}).namespace) == 33


@pytest.mark.parametrize("name", ["extra_key", "lora_path", "session_id"])
def test_name_when_it_is_long_or_no_word_then_a_hash_stands_for_it(name):
    def named(value):
        read = prompt.read(GENERATE, json.dumps({"text": "x", name: value}).encode(), {})
        return read.session if name == "session_id" else read.namespace.removeprefix("\0")

    assert [named(value) for value in ("k", "x" * 256, 5)] == ["k", "x" * 256, "5"]
    others = ["x" * 300, "x" * 301, [1] * 1000, [1] * 1001, {"a": [1] * 1000}]
    assert len({named(value) for value in others}) == len(others) and all(len(named(value)) == 32 for value in others)


def test_prompt_when_it_has_more_tokens_than_its_text_tells_then_it_is_hashed_beside_the_loop(monkeypatch):
    threads, text = [], "x" * 90_000

    def told(*args):
        threads.append(threading.current_thread().name)
        return block_ids(*args)

    async def scenario():
        monkeypatch.setattr(asked_prompt, "block_ids", told)
        async with running([FakeServer("a", events=True)]) as rig:
            assert (await rig.ask(text=text))[0] == 200

    asyncio.run(scenario())
    (thread,) = threads
    assert thread.startswith("banyan-read-prompt")
