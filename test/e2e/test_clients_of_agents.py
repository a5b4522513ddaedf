# SPDX-License-Identifier: Apache-2.0
"""The clients that agents use, through `banyan route` on two servers: conversations of five turns with a tool.

Each conversation is held with one server alone first, and then, from empty caches, with the router in front of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from test.e2e.conftest import ARGS, MODEL, Client, until

from banyan.router.paths import ROWS, To
from benchmark.router_failover import router
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]

PAGE = 16
TURNS = 5
ANSWER_TOKENS = 12
NUM_TRIES = 3
"""A server that is slow to tell the tokens of a prompt is not waited for: such a conversation says nothing of them, and
no more does a stream that has ended before its client could leave."""

CALL_TURN = 2
"""The turn whose answer also calls the tool, as its client tells it: so small a model calls none by itself."""

CALL, TOOL, RESULT, ARGUMENTS = "call_1", "soil", "dry", {"bed": 2}
MARK = {"type": "ephemeral"}

NAME = "smollm"
SYSTEM = "You look after a garden and answer in a few words. " + " ".join(
    f"Bed {number} has {plant} that wants water every {number + 1} days."
    for number, plant in enumerate(["mint", "sage", "dill"] * 20)
)
ABOUT = "Reads how wet the soil of a bed is."
PARAMETERS = {"type": "object", "properties": {"bed": {"type": "integer"}}, "required": ["bed"]}


@dataclass(frozen=True)
class Answered:
    """One turn as its client read it."""

    said: str
    prompt_tokens: int
    cached_tokens: int


@pytest.fixture(scope="module")
def routed(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("agents")
    template = Path(__file__).with_name("tools.jinja")
    flags = (*ARGS, "--chat-template", str(template), "--tool-call-parser", "qwen25", "--served-model-name", NAME)
    flags = (*flags, "--enable-cache-report", "--enable-response-store")

    def start(label: str, core: int) -> Server:
        events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "bind": True}
        events["replay_endpoint"] = f"tcp://127.0.0.1:{free_port()}"
        more = (*flags, "--kv-events-config", json.dumps(events))
        return ForkedServer(ServerSpec(label, 1, "on", more, cpu_env(dp=1, first_core=core)), MODEL, folder)

    with start("one", 0) as one, start("two", 1) as two:
        wait_ready([one, two])
        with router([one.url, two.url], "lmetric", folder / "router.log") as url:
            itself = Client(SimpleNamespace(url=url))
            yield SimpleNamespace(url=url, servers=[Client(one), Client(two)], itself=itself)


def counter(routed: SimpleNamespace, name: str, label: str = "") -> float:
    lines = [line for line in routed.itself.get("/metrics").splitlines() if label in line]
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"banyan_router_{name}_total"))


# ---- one conversation with each client -----------------------------------------------------------------------------


def messages_turns(url: str) -> Iterator[Answered]:
    """Claude Code's: Messages, streamed, with marks of what is to be cached that move."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": TOOL, "description": ABOUT, "input_schema": PARAMETERS}
    system = [{"type": "text", "text": SYSTEM, "cache_control": MARK}]
    history: list[Any] = []
    for turn in range(TURNS):
        history.append({"role": "user", "content": [{"type": "text", "text": question(turn), "cache_control": MARK}]})
        with client.messages.stream(
            model=NAME, max_tokens=ANSWER_TOKENS, system=system, tools=[tool], messages=history,
            metadata={"user_id": "gardener"}, extra_body={"temperature": 0},
        ) as stream:  # fmt: skip
            message = stream.get_final_message()
        del history[-1]["content"][0]["cache_control"]
        said = "".join(block.text for block in message.content if block.type == "text")
        content: list[Any] = [{"type": "text", "text": said}]
        if turn == CALL_TURN:
            content.append({"type": "tool_use", "id": CALL, "name": TOOL, "input": ARGUMENTS})
        history.append({"role": "assistant", "content": content})
        if turn == CALL_TURN:
            result = {"type": "tool_result", "tool_use_id": CALL, "content": RESULT}
            history.append({"role": "user", "content": [result]})
        cached = message.usage.cache_read_input_tokens or 0
        yield Answered(said, message.usage.input_tokens + cached, cached)


def chat_turns(url: str, create: Callable[..., Any] | None = None) -> Iterator[Answered]:
    """OpenAI's chat; ``create`` stands for another client that speaks it."""
    create = create or openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions.create
    tool = {"type": "function", "function": {"name": TOOL, "description": ABOUT, "parameters": PARAMETERS}}
    history: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        history.append({"role": "user", "content": question(turn)})
        answer = create(model=NAME, max_tokens=ANSWER_TOKENS, tools=[tool], messages=history, temperature=0)
        said = answer.choices[0].message.content or ""
        history.append({"role": "assistant", "content": said})
        if turn == CALL_TURN:
            call = {"name": TOOL, "arguments": json.dumps(ARGUMENTS)}
            history[-1]["tool_calls"] = [{"id": CALL, "type": "function", "function": call}]
            history.append({"role": "tool", "tool_call_id": CALL, "content": RESULT})
        details = answer.usage.prompt_tokens_details
        yield Answered(said, answer.usage.prompt_tokens, (details.cached_tokens or 0) if details else 0)


def litellm_turns(url: str) -> Iterator[Answered]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    # It asks for a list of prices where it is imported, unless it is told not to.
    import litellm

    def create(**fields: Any) -> Any:
        fields["model"] = f"openai/{fields['model']}"
        return litellm.completion(api_base=f"{url}/v1", api_key="none", max_retries=0, **fields)

    return chat_turns(url, create)


def responses_turns(url: str) -> Iterator[Answered]:
    """Codex': Responses, streamed; behind the tool's turn by the id of the response before."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": TOOL, "description": ABOUT, "parameters": PARAMETERS, "strict": False}
    history: list[Any] = []
    before: dict[str, Any] = {}
    for turn in range(TURNS):
        new = {"role": "user", "content": question(turn)}
        history.append(new)
        asked: Any = history if turn <= CALL_TURN + 1 else [new]
        stream = client.responses.create(
            model=NAME, instructions=SYSTEM, max_output_tokens=ANSWER_TOKENS, tools=[tool], temperature=0,
            input=asked, stream=True, prompt_cache_key="gardener", **(before if asked is not history else {}),
        )  # fmt: skip
        response = list(stream)[-1].response
        before = {"previous_response_id": response.id}
        said = response.output_text
        history.append({"role": "assistant", "content": said})
        if turn == CALL_TURN:
            call = {"name": TOOL, "arguments": json.dumps(ARGUMENTS)}
            history.append({"type": "function_call", "call_id": CALL, **call})
            history.append({"type": "function_call_output", "call_id": CALL, "output": RESULT})
        yield Answered(said, response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens)


def question(turn: int) -> str:
    return f"What does bed {turn} need?"


# ---- what is to hold -----------------------------------------------------------------------------------------------


def flush(client: Client) -> None:
    client.post("/flush_cache?timeout=30", {})


def known_blocks(routed: SimpleNamespace) -> list[int]:
    """How many the router knows of at each server."""
    return [sum(state["known_blocks"]) for state in json.loads(routed.itself.get("/router/servers"))]


def held(routed: SimpleNamespace, turns: Callable[[str], Iterator[Answered]]) -> tuple[list[Answered], list[float]]:
    """The answers of a conversation that begins with empty caches; how many tokens of each prompt the router took to be
    in one."""
    flush(routed.itself)
    until(lambda: not any(known_blocks(routed)))
    answers, expected = [], []
    before = counter(routed, "cached_tokens")
    for answer in turns(routed.url):
        answers.append(answer)
        expected.append(counter(routed, "cached_tokens") - before)
        before += expected[-1]
        # What an answer leaves in the caches the router hears of later: the prompt, and a moment after it the rest.
        num_pages = (answer.prompt_tokens - 1) // PAGE
        until(lambda num_pages=num_pages: max(known_blocks(routed)) >= num_pages)
        time.sleep(0.5)
    return answers, expected


@pytest.mark.parametrize("turns", [messages_turns, chat_turns, responses_turns, litellm_turns])
def test_conversation_when_a_client_holds_it_through_the_router_then_it_goes_as_with_one_server_and_from_its_cache(
    routed, turns
):
    flush(routed.itself)
    alone = [one.said for one in turns(routed.servers[0].server.url)]
    assert len(set(alone)) > 1
    for _ in range(NUM_TRIES):
        before = counter(routed, "untokenised")
        answers, expected = held(routed, turns)
        if counter(routed, "untokenised") == before:
            break
    else:
        pytest.fail("prompts are placed without their tokens")
    assert [one.said for one in answers] == alone
    found = [one.cached_tokens for one in answers]
    shares = [one.cached_tokens / one.prompt_tokens for one in answers]
    assert min(shares[1:]) >= 0.9, (shares, answers)
    assert all(abs(of - for_) <= PAGE for of, for_ in zip(expected, found, strict=True)), (expected, found)


def test_answer_when_a_path_is_placed_at_one_server_then_it_is_the_servers_to_the_byte(routed):
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            for row in ROWS:
                # What it tells of the model has the time in it.
                if row.to is not To.ONE or row.path == "/api/tags":
                    continue
                path, method = row.path.replace("{model:path}", NAME), row.methods[0]
                json_ = {} if method == "POST" else None
                answers = []
                for url in (routed.servers[0].server.url, routed.url):
                    async with session.request(method, url + path, json=json_) as answer:
                        headers = {name.lower(): value for name, value in answer.headers.items()}
                        told = {name: headers[name] for name in headers if name not in ("date", "server")}
                        # A model's description has the second in it in which it was asked for.
                        body = re.sub(rb'"created":\d+', b'"created":0', await answer.read())
                        answers.append((answer.status, told, body))
                assert answers[0] == answers[1], row.path

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["messages", "responses", "chat"])
def test_stream_when_its_client_leaves_then_the_server_stops(routed, path):
    begin = {"messages": _leave_messages, "responses": _leave_responses, "chat": _leave_chat}[path]
    for _ in range(NUM_TRIES):
        num_left, num_ended = counter(routed, "attempts", 'outcome="left"'), counter(routed, "attempts")
        begin(routed.url)
        until(lambda before=num_ended: counter(routed, "attempts") > before, told=lambda: "the router still reads it")
        if counter(routed, "attempts", 'outcome="left"') == num_left + 1:
            break
    else:
        pytest.fail("it had ended before")
    until(lambda: not any(num_running(server) for server in routed.servers), told=lambda: "it goes on")


def num_running(server: Client) -> int:
    return sum(load["num_running_reqs"] for load in json.loads(server.get("/v1/loads?include=core"))["loads"])


def _leave_messages(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: Sequence[Any] = [{"role": "user", "content": "Tell a long story."}]
    with client.messages.create(model=NAME, max_tokens=3000, messages=asked, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"


def _leave_responses(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client.responses.create(model=NAME, max_output_tokens=3000, input="Tell a long story.", stream=True) as stream:
        assert next(iter(stream)).type == "response.created"


def _leave_chat(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": "Tell a long story."}]
    with client.chat.completions.create(model=NAME, max_tokens=3000, messages=asked, stream=True) as stream:
        assert next(iter(stream)).choices
