# SPDX-License-Identifier: Apache-2.0
"""The kinds of requests that a server under soak gets, and how often.

Each kind is a function of one client. What it asks, it judges: known prompts by their tokens, grammars by their form,
what is meant to harm by its status.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from banyan.routing.cache_path import CACHE_PATH
from benchmark import drawn_requests, told_requests
from benchmark.modes.models import random_prompt
from benchmark.soak.asking import Client, is_aborted
from benchmark.soak.expected import GREEDY, NUM_TOKENS, Known, logprob_complaint

NUM_RANKS = 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
REGEX = "[ab]{3}-[0-9]"
TENANTS: tuple[dict[str, str], ...] = ({}, {}, *({"cache_salt": f"tenant {number}"} for number in range(4)))
TTLS_S = (0.1, 2.0, 20.0)
GRAMMAR = 'root ::= "yes" | "no"'

Kind = Callable[[Client], Awaitable[None]]


def asked(client: Client, known: Known, **fields: Any) -> dict[str, Any]:
    """A greedy request for a known prompt: half of them at a rank of their own choice, some with a wish."""
    body: dict[str, Any] = {"input_ids": list(known.ids), "sampling_params": dict(GREEDY)}
    if known.adapter is not None:
        body["lora_path"] = known.adapter
    if client.rng.random() < 0.5:
        body["routed_dp_rank"] = client.rng.randrange(NUM_RANKS)
    if client.rng.random() < 0.3:
        body["kv_hints"] = hints(wish(client))
    elif client.rng.random() < 0.15 and known.adapter is None:
        # What an adapter computes is not known by its tokens: a refusal.
        body["kv_hints"] = hints(told_action(client))
    return {**body, **fields}


Action = tuple[str, dict[str, Any]]


def hints(*actions: Action) -> dict[str, Any]:
    said = [
        {"action_id": str(at), "action_type": name, "action_version": "1", "payload": payload}
        for at, (name, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": said}


def wish(client: Client) -> Action:
    """What a client may ask of Banyan."""
    return client.rng.choice(
        [
            ("banyan.plan", {"action": client.rng.choice(["move", "compute"])}),
            ("banyan.policy", {"policy": client.rng.choice(["lmetric", "round_robin"])}),
        ]
    )


def told_action(client: Client) -> Action:
    """What the cache is told of a request's own prompt, or of another one. All of it is granted."""
    name = client.rng.choice(["retain", "prefetch", "demote", "release"])
    payload: dict[str, Any] = {"ttl_s": client.rng.choice(TTLS_S)}
    if client.rng.random() < 0.3:
        payload["input_ids"] = list(client.rng.choice(client.known).ids)
    return name, payload


async def plain(client: Client) -> None:
    known = client.rng.choice(client.known)
    client.judge("plain", known, await client.post("plain", "/generate", asked(client, known)))


async def streamed(client: Client) -> None:
    known = client.rng.choice(client.known)
    client.judge("streamed", known, await client.stream("streamed", asked(client, known)))


async def salted(client: Client) -> None:
    """A tenant's own copy of a known prompt."""
    known = client.rng.choice(client.known)
    fields = {client.rng.choice(["cache_salt", "extra_key"]): f"tenant {client.rng.randrange(4)}"}
    client.judge("salted", known, await client.post("salted", "/generate", asked(client, known, **fields)))


async def told(client: Client) -> None:
    """A command about a known prompt, of one of the tenants. A pin may be over the budget."""
    action = client.rng.choice(["pin", "pin", "retain", "prefetch", "demote", "release", "list"])
    known, tenant = client.rng.choice(client.known), client.rng.choice(TENANTS)
    body = {"action": action, "input_ids": list(known.ids), "ttl_s": client.rng.choice(TTLS_S), **tenant}
    await client.post("told", CACHE_PATH, body, allowed=(200, 409) if action == "pin" else (200,))


async def pinned(client: Client) -> None:
    """A prompt that is pinned as it comes; over the budget it is refused."""
    known, tenant = client.rng.choice(client.known), client.rng.choice(TENANTS)
    action = ("pin", {"ttl_s": client.rng.choice(TTLS_S)})
    body = asked(client, known, kv_hints=hints(action), **tenant)
    client.judge("pinned", known, await client.post("pinned", "/generate", body, allowed=(200, 400)))


async def adapted(client: Client) -> None:
    """A prompt with an adapter: most are known without, too, and have other tokens."""
    known = client.rng.choice(client.adapted)
    client.judge("adapted", known, await client.post("adapted", "/generate", asked(client, known)))


async def fresh(client: Client) -> None:
    """A prompt that nobody has seen, behind a beginning that many have."""
    stem = client.rng.choice(client.known).ids[: client.rng.randrange(0, 300)]
    ids = [*stem, *random_prompt(client.rng, client.rng.randrange(10, 400))]
    sampling = {"max_new_tokens": client.rng.randrange(1, 24), "temperature": client.rng.choice([0, 1.0])}
    await client.post("fresh", "/generate", {"input_ids": ids, "sampling_params": sampling})


async def large(client: Client) -> None:
    """Most of a pool: others are evicted, or wait, or are retracted."""
    ids = random_prompt(client.rng, client.rng.randrange(1500, 3000))
    sampling = {"max_new_tokens": client.rng.randrange(1, 200), "ignore_eos": True}
    await client.post("large", "/generate", {"input_ids": ids, "sampling_params": sampling})


async def closed(client: Client) -> None:
    """A connection that ends at any moment."""
    body = asked(client, client.rng.choice(client.known))
    body["sampling_params"]["max_new_tokens"] = client.rng.randrange(20, 400)
    if client.rng.random() < 0.5:
        await client.stream("closed", body, num_events=client.rng.randrange(1, 12))
        return
    asking = asyncio.create_task(client.post("closed", "/generate", body))
    await asyncio.sleep(client.rng.random() * 0.3)
    asking.cancel()
    try:
        await asking
    except asyncio.CancelledError:
        client.tally.answered("closed", "closed")


async def aborted(client: Client) -> None:
    """A request that somebody ends by its id, at any moment. What it has said until then is right."""
    known, rid = client.rng.choice(client.known), uuid.uuid4().hex
    body = asked(client, known, rid=rid)
    asking = asyncio.create_task(client.post("aborted", "/generate", body))
    await asyncio.sleep(client.rng.random() * 0.2)
    await client.post("abort", "/abort_request", {"rid": rid})
    client.judge("aborted", known, await asking)


async def session(client: Client) -> None:
    """A session of some turns; some are closed while they are at it. SGLang's ranks know the turns that they had
    themselves, so that all of them go to one."""
    name, known = uuid.uuid4().hex, client.rng.choice(client.known)
    if await client.post("session", "/open_session", {"capacity_of_str_len": 4000, "session_id": name}) is None:
        return
    parent, rank = None, client.rng.randrange(NUM_RANKS)
    for turn in range(client.rng.randrange(1, 5)):
        ids = list(known.ids) if turn == 0 else random_prompt(client.rng, client.rng.randrange(1, 60))
        place = {"id": name, "rid": parent, "offset": -1, "replace": False}
        body = {"input_ids": ids, "sampling_params": dict(GREEDY), "session_params": place}
        body["routed_dp_rank"] = rank
        if client.rng.random() < 0.3:
            # Its end releases this.
            body["kv_hints"] = hints(("retain", {"ttl_s": max(TTLS_S), "input_ids": list(known.ids)}))
        answer = await client.post("session", "/generate", body)
        if turn == 0 and not client.judge("session", known, answer):
            break
        if answer is None or is_aborted(answer):
            break
        parent = answer["meta_info"]["id"]
    running = None
    if client.rng.random() < 0.3:
        body = {"input_ids": [5, 6, 7], "sampling_params": dict(GREEDY), "routed_dp_rank": rank}
        body["session_params"] = {"id": name, "rid": parent, "offset": -1, "replace": False}
        running = asyncio.create_task(client.post("session", "/generate", body, allowed=(200, 400)))
        await asyncio.sleep(client.rng.random() * 0.02)
    await client.post("session", "/close_session", {"session_id": name})
    if running is not None:
        await running


async def several(client: Client) -> None:
    """Several answers to one prompt, or to several."""
    known = [client.rng.choice(client.known) for _ in range(client.rng.choice([1, 1, 3]))]
    number = client.rng.randrange(2, 4) if len(known) == 1 else 1
    body: dict[str, Any] = {"sampling_params": {**GREEDY, "n": number}}
    body["input_ids"] = list(known[0].ids) if len(known) == 1 else [list(one.ids) for one in known]
    answers = await client.post("several", "/generate", body)
    for one, answer in zip(known * number, answers or (), strict=answers is not None):
        client.judge("several", one, answer)


async def logprobs(client: Client) -> None:
    known = client.rng.choice(client.known)
    start = client.rng.randrange(len(known.ids))
    body = asked(client, known, return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
    answer = await client.post("logprobs", "/generate", body)
    if client.judge("logprobs", known, answer):
        told = answer["meta_info"]["input_token_logprobs"]
        client.tally.compared("logprobs", logprob_complaint(known, start, told), client.at_s())


async def grammar(client: Client) -> None:
    field, value = client.rng.choice([("json_schema", json.dumps(SCHEMA)), ("regex", REGEX), ("ebnf", GRAMMAR)])
    ids = list(client.rng.choice(client.known).ids)
    sampling = {"max_new_tokens": 64, "temperature": 0, field: value}
    answer = await client.post("grammar", "/generate", {"input_ids": ids, "sampling_params": sampling})
    if (
        answer is not None
        and answer["meta_info"]["finish_reason"]["type"] == "stop"
        and not fits(field, answer["text"])
    ):
        client.failed("grammar", f"{field}: {answer['text']!r}")


def fits(field: str, text: str) -> bool:
    """Whether a text has the form that `field` asks for."""
    if field == "regex":
        return re.fullmatch(REGEX, text) is not None
    if field == "ebnf":
        return text in ("yes", "no")
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["a"] and isinstance(value["a"], bool)


async def same_name(client: Client) -> None:
    """Two prompts under one id, one after the other."""
    rid = uuid.uuid4().hex
    for known in client.rng.sample(client.known, 2):
        body = asked(client, known, rid=rid)
        if not client.judge("same name", known, await client.post("same name", "/generate", body)):
            return  # It may still run, and SGLang takes no second one meanwhile.


async def completions(client: Client) -> None:
    known = client.rng.choice(client.known)
    body = {"model": "any", "prompt": list(known.ids), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await client.post("completions", "/v1/completions", body)
    if answer is not None and answer["choices"][0]["finish_reason"] == "length":
        said = answer["choices"][0]["text"]
        wrong = "" if said == known.text else f"{said!r} instead of {known.text!r}"
        client.tally.compared("completions", wrong, client.at_s())


async def chat(client: Client) -> None:
    words = " ".join(client.rng.choice(["root", "branch", "leaf", "page"]) for _ in range(client.rng.randrange(1, 60)))
    messages = [{"role": "system", "content": "You are a tree. " * 8}, {"role": "user", "content": words}]
    await client.post("chat", "/v1/chat/completions", {"model": "any", "messages": messages, "max_tokens": 4})


async def marked(client: Client) -> None:
    """Messages with `cache_control`: an agent marks its system prompt, whoever else asks."""
    control = {"type": "ephemeral", "ttl": client.rng.choice(["5m", "1h"])}
    system = [{"type": "text", "text": "You are a tree. " * client.rng.randrange(1, 40), "cache_control": control}]
    body = {"model": "any", "max_tokens": 4, "system": system, "messages": [{"role": "user", "content": "leaf"}]}
    await client.post("marked", "/v1/messages", body)


async def looking(client: Client) -> None:
    """What gateways and people look at."""
    path = client.rng.choice(["/health", "/v1/models", "/model_info", "/metrics", "/v1/loads"])
    async with client.http.get(client.url + path) as response:
        await response.read()
    client.tally.answered("looking", str(response.status))
    if response.status != 200:
        client.failed("looking", f"{path} {response.status}")


async def harmful(client: Client) -> None:
    """A body that is broken in some way, or says what only the server may say. Any status is right; none is not."""
    kind = client.rng.choice([drawn_requests.request, told_requests.told])
    request = kind(client.rng, client.known[0].ids)
    try:
        async with client.http.post(client.url + request.path, data=request.body, headers=request.headers) as response:
            await response.read()
    except aiohttp.ClientPayloadError:
        # SGLang breaks a stream off, behind its status, whose request turns out to be none.
        client.tally.answered("harmful", "broken off")
        return
    except (TimeoutError, OSError) as error:
        client.tally.answered("harmful", "broken")
        client.failed("harmful", f"{type(error).__name__}: {error}: {request.path} {request.body[:300]!r}")
        return
    client.tally.answered("harmful", str(response.status))


KINDS: dict[Kind, int] = {
    plain: 24,
    streamed: 12,
    salted: 4,
    told: 4,
    pinned: 3,
    adapted: 6,
    fresh: 14,
    large: 1,
    closed: 6,
    aborted: 5,
    session: 3,
    several: 4,
    logprobs: 5,
    grammar: 2,
    same_name: 4,
    completions: 6,
    chat: 3,
    marked: 2,
    looking: 2,
    harmful: 5,
}
"""How often each is drawn, of the sum."""
