# SPDX-License-Identifier: Apache-2.0
"""A real server behind a router that knows tenants: none of them finds another's prompts, on any path."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import pytest
from test.e2e.conftest import ARGS, MODEL, Client, until

from benchmark.servers import ServerSpec, beside, cpu_env, free_port, wait_ready, write_secret
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
SHARES = ("--banyan-host-gb", "0.014", "--banyan-tenant-share", "0.5")
"""An arena of some 200 pages of the model's."""
NAME = "smollm"
KEYS = {"acme": "a1", "umbrella": "u1", "initech": "i1"}
TEXT = "The garden has a bed of mint, a bed of sage and a bed of dill, and all of them want water. " * 12


@pytest.fixture(scope="module")
def routed(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    secret = write_secret(folder / "secret")
    tenants = folder / "tenants.toml"
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    tenants.write_text(
        "\n".join(f'[{name}]\nkeys = ["sha256:{one}"]\ncommon = ["all"]' for name, one in digests.items())
    )
    tenants.chmod(0o600)
    events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "bind": True}
    flags = (*ARGS, "--served-model-name", NAME, "--enable-cache-report", "--enable-response-store")
    flags = (*flags, "--kv-events-config", json.dumps(events), "--banyan-tenant-secret-file", str(secret), *SHARES)
    spec = ServerSpec("tenants", 1, "on", flags, cpu_env(dp=1))
    with ForkedServer(spec, MODEL, folder) as server:
        wait_ready([server])
        url = f"http://127.0.0.1:{free_port()}"
        command = [
            sys.executable,
            "-m",
            "banyan.cli",
            "route",
            "--port",
            url.rpartition(":")[2],
            "--server",
            server.url,
        ]
        command += ["--tenants-file", str(tenants), "--tenant-secret-file", str(secret)]
        with beside(command, folder / "router.log", f"{url}/health"):
            yield SimpleNamespace(server=Client(server), router=Client(SimpleNamespace(url=url)), tenants=tenants)


def said(text):
    return [{"role": "user", "content": text}]


PATHS = {
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": lambda text: {"model": NAME, "prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"model": NAME, "messages": said(text), "max_tokens": 1},
    "/v1/messages": lambda text: {"model": NAME, "messages": said(text), "max_tokens": 1},
    "/v1/responses": lambda text: {"model": NAME, "input": text, "max_output_tokens": 8},
}
"""A body by path."""


def ask(client, path, body, headers=None):
    """The answer; a refusal is told in its own words."""
    try:
        return client.post(path, body, headers=headers)
    except urllib.error.HTTPError as refused:
        raise AssertionError(refused.read().decode()) from refused


def cached(answer):
    """Cached tokens, wherever an answer tells them."""
    if "meta_info" in answer:
        return answer["meta_info"]["cached_tokens"]
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("cache_read_input_tokens") or details.get("cached_tokens") or 0


@pytest.mark.parametrize("path", PATHS)
def test_prompt_when_another_tenant_has_sent_it_then_nothing_of_it_is_found_and_its_own_is(routed, path):
    body = PATHS[path](f"On {path}: {TEXT}")
    found = {}
    for name in ("acme", "umbrella"):
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        found[name] = [cached(ask(routed.router, path, body, headers)) for _ in range(2)]
    # The first page may be one of a template, which this tenant has sent on another path.
    assert found["acme"][1] > 200 and found["umbrella"][1] > 200
    assert found["umbrella"][0] == found["acme"][0] < 64


def test_prompt_when_a_client_shares_it_on_request_then_another_tenant_finds_it(routed):
    body = PATHS["/v1/messages"](f"For all: {TEXT}")
    found = []
    for key in KEYS.values():
        headers = {"x-api-key": key, "x-banyan-common": "all"}
        found.append(cached(ask(routed.router, "/v1/messages", body, headers)))
    assert found[0] < 64 and min(found[1:]) > 200


@pytest.mark.parametrize("salt", ["", "mine"])
def test_salt_when_a_client_sends_its_own_then_it_is_one_within_its_tenant(routed, salt):
    body = {**PATHS["/generate"](f"Salted: {TEXT}"), **({"cache_salt": salt} if salt else {})}
    headers = {"authorization": f"Bearer {KEYS['initech']}"}
    first, second = (cached(ask(routed.router, "/generate", body, headers)) for _ in range(2))
    assert first < 64 and second > 200


@pytest.mark.parametrize("path", PATHS)
def test_request_when_no_router_says_whose_it_is_then_the_server_refuses_it_and_goes_on(routed, path):
    for headers in ({}, {"x-banyan-tenant": "0" * 64}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            routed.server.post(path, PATHS[path](TEXT), headers=headers)
        assert refused.value.code == 400 and b"banyan route" in refused.value.read()
    assert routed.server.get("/health") == ""


def test_stream_when_no_router_says_whose_it_is_then_it_says_so(routed):
    with pytest.raises(urllib.error.HTTPError) as refused:
        routed.server.post("/v1/chat/completions", {**PATHS["/v1/chat/completions"](TEXT), "stream": True})
    assert refused.value.code == 400


def test_scan_when_a_tenant_asks_for_more_than_the_arena_holds_then_anothers_prompts_stay_in_it(routed):
    """The pools have no shares: there the scan pushes everything out."""
    drawn = random.Random(7)
    num_frames, scanned = routed.server.ranks()[0]["num_arena_frames"], 1_200

    def ask_for(name, prompts):
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        bodies = (Client.body(prompt, num_tokens=1) for prompt in prompts)
        return [ask(routed.router, "/generate", body, headers)["meta_info"] for body in bodies]

    def drawn_prompts(num_prompts, num_tokens):
        return [[drawn.randrange(100, 40_000) for _ in range(num_tokens)] for _ in range(num_prompts)]

    small = drawn_prompts(3, 330)
    before = routed.server.total("backed_up_pages")
    ask_for("acme", small)
    until(lambda: routed.server.total("backed_up_pages") - before >= 3 * 20)
    ask_for("umbrella", drawn_prompts(3 * num_frames * 16 // scanned, scanned))
    assert routed.server.ranks()[0]["num_arena_evicted_pages"] > num_frames
    found = [(one["cached_tokens_details"] or {"host": 0})["host"] for one in ask_for("acme", small)]
    assert min(found) >= 320, found


def test_file_when_a_tenant_is_taken_out_then_its_key_opens_nothing_any_more(routed):
    text = routed.tenants.read_text()
    routed.tenants.write_text(text.partition("[initech]")[0])
    os.utime(Path(routed.tenants))
    headers = {"authorization": f"Bearer {KEYS['initech']}"}

    def is_refused():
        try:
            routed.router.post("/generate", PATHS["/generate"]("hi"), headers=headers)
        except urllib.error.HTTPError as refused:
            assert refused.code == 401
            return True
        return False

    until(is_refused, told=lambda: "the key still opens")
