# SPDX-License-Identifier: Apache-2.0
"""A router that knows tenants: by their keys, from a file; what each may ask, and what servers are told."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os

import pytest
from test.unit.router.fake_server import BLOCK_TOKENS, FakeServer, running, until

from banyan.router import tenant_rules
from banyan.router.blocks import block_ids, pack, salt_digests
from banyan.router.events import BlockStored
from banyan.router.settings import Settings, add_flags, take_flags
from banyan.router.tenants import MOST_FILE_BYTES, Keys, Tenants
from banyan.routing.headers import SOURCE_HEADER, TENANT_HEADER, TENANT_NAME_HEADER
from banyan.routing.question import question
from banyan.routing.tenant_secret import TenantSecret, salted

SECRET = b"a secret of routers and servers"
SAID_WITH = TenantSecret(SECRET)
ACME, UMBRELLA = (SAID_WITH.salt_of("tenant", name) for name in ("acme", "umbrella"))
PROMPT = "a prompt of some length, long enough for pages"


def digest(key):
    return f'"sha256:{hashlib.sha256(key.encode()).hexdigest()}"'


FILE = f"""
[acme]
keys = [{digest("a1")}, {digest("a2")}]
common = ["handbook"]

[umbrella]
keys = [{digest("u1")}]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tenants.toml"
    write(path, FILE)
    return path


def write(path, text):
    path.write_text(text)
    path.chmod(0o600)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def server(name, **more):
    made = FakeServer(name, banyan=True, **more)
    made.banyan_state = {"tenants": SAID_WITH.name}
    return made


def serving(servers, path, **settings):
    return running(servers, tenants_file=str(path), tenant_secret_file="s", tenant_secret=SECRET, **settings)


async def ask(rig, headers, path="/generate", **fields):
    async with rig.client.post(rig.served.url + path, json=fields, headers=headers) as response:
        return response.status, await response.read()


# ---- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no tenant"),
        ("= 3", "Invalid"),
        ("[acme]", "keys: a list"),
        ("[acme]\nkeys = []", "keys: a list"),
        ('[acme]\nkeys = ["sk-1"]', "sha256sum"),
        (f"[acme]\nkeys = [{digest('a')}]\ncolour = 1", "colour: not known"),
        (f"[acme]\nkeys = [{digest('a')}]\ncommon = [1]", "common: a list of names"),
        (f'["no name"]\nkeys = [{digest("a")}]', "letters, digits"),
        ("acme = 1", "no table"),
        (f"[acme]\nkeys = [{digest('')}]", "an empty key"),
        pytest.param("acme = " + "[" * 100_000, "too deep", id="deep"),
        (f"[a]\nkeys = [{digest('a')}]\n[b]\nkeys = [{digest('a')}]", "a key of a as well"),
    ],
)
def test_file_when_it_is_wrong_then_the_line_says_where_and_shows_no_key(text, line):
    with pytest.raises(ValueError, match=line) as refused:
        Keys.parse(text)
    assert "sk-1" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_file_when_others_may_open_it_then_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
        Keys.read(path)


def test_file_when_it_is_too_large_or_a_pipe_then_refused(path):
    path.write_bytes(b"#" * (MOST_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="more than"):
        Keys.read(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match="others may open it"):
        Keys.read(path)


def test_key_when_it_is_a_tenants_then_that_is_found_and_its_digest_is_no_key():
    keys = Keys.parse(FILE)
    assert [keys.tenant(key).name for key in ("a1", "a2", "u1")] == ["acme", "acme", "umbrella"]
    assert keys.tenant(hashlib.sha256(b"a1").hexdigest()) is None and keys.tenant("") is None


def test_key_when_it_has_more_than_ascii_then_it_is_the_bytes_that_the_client_sends(path):
    write(path, FILE.replace(digest("u1"), digest("schlüssel")))

    async def scenario():
        async with serving([server("a")], path) as rig:
            assert (await ask(rig, bearer("schlüssel"), text="hi"))[0] == 200
            assert (await ask(rig, bearer("Schlüssel"), text="hi"))[0] == 401

    asyncio.run(scenario())


def test_operator_when_the_servers_have_no_key_then_an_empty_one_opens_nothing(path):
    for headers in ({"authorization": "Basic x"}, {"x-api-key": ""}, {}):
        assert not Tenants(path, SECRET, "").is_operator(headers)
        assert not Tenants(path, SECRET, None).is_operator(headers)


def test_secret_when_it_is_shown_then_nothing_of_it_is_seen():
    assert "secret of" not in repr(SAID_WITH)


def test_file_when_it_changes_then_it_counts_and_a_wrong_one_does_not(path):
    tenants = Tenants(path, SECRET, None)
    assert not tenants.refresh()
    write(path, FILE.replace("umbrella", "initech"))
    assert tenants.refresh() and tenants.keys.tenant("u1").name == "initech"
    write(path, "[acme]")
    assert not tenants.refresh() and tenants.keys.tenant("u1").name == "initech" and "keys" in tenants.why_stale
    path.unlink()
    assert not tenants.refresh() and tenants.keys.tenant("u1").name == "initech"
    write(path, FILE)
    assert tenants.refresh() and tenants.why_stale is None and tenants.keys.tenant("u1").name == "umbrella"


def test_file_when_asked_to_read_it_again_then_it_is_read_once(path):
    tenants = Tenants(path, SECRET, None)
    tenants.read_again()
    assert [tenants.refresh(), tenants.refresh()] == [True, False]


def test_settings_when_a_flag_is_missing_then_the_line_names_both():
    for flags in ({"tenants_file": "a"}, {"tenant_secret_file": "a"}):
        with pytest.raises(ValueError, match=r"--tenants-file, --tenant-secret-file.*--banyan-tenant-secret-file"):
            Settings(servers=("http://a:1",), **flags)
    assert "secret of" not in repr(Settings(servers=("http://a:1",), tenant_secret=SECRET))


# ---- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "salt"),
    [
        (bearer("a1"), ACME),
        ({"authorization": "bearer  a2 "}, ACME),
        ({"x-api-key": "u1"}, UMBRELLA),
        ({"x-api-key": "a1", **bearer("a2")}, ACME),
        ({**bearer("a1"), "x-banyan-common": "handbook"}, SAID_WITH.salt_of("common", "handbook")),
        (
            {
                **bearer("a1"),
                TENANT_HEADER: SAID_WITH.word(UMBRELLA),
                TENANT_NAME_HEADER: "umbrella",
                SOURCE_HEADER: "b:1",
            },
            ACME,
        ),
    ],
)
@pytest.mark.parametrize("path_", ["/generate", "/v1/messages", "/v1/responses", "/api/chat", "/v1/score"])
def test_request_when_its_key_is_a_tenants_then_the_server_is_told_whose_it_is_and_not_the_key(
    path, headers, salt, path_
):
    async def scenario():
        async with serving([server("a")], path, api_key="the servers' own") as rig:
            assert (await ask(rig, headers, path_, input="hi"))[0] == 200
            _, seen = rig.servers[0].seen[-1]
            assert SAID_WITH.heard(seen[TENANT_HEADER]) == salt
            assert seen[TENANT_NAME_HEADER] == ("umbrella" if "u1" in headers.values() else "acme")
            assert seen["authorization"] == "Bearer the servers' own"
            assert not {"x-api-key", "x-banyan-common", SOURCE_HEADER} & seen.keys()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer("nobody's"), 401),
        ({"authorization": "Basic a1"}, 401),
        ({**bearer("a1"), "x-api-key": "u1"}, 401),
        ({**bearer("a1"), "x-api-key": ""}, 401),
        ({**bearer("u1"), "x-banyan-common": "handbook"}, 403),
    ],
)
def test_request_when_it_is_no_tenants_then_refused_and_no_server_hears_of_it(path, headers, status):
    async def scenario():
        async with serving([server("a")], path) as rig:
            said = await ask(rig, headers, "/v1/messages", messages=[{"role": "user", "content": "hi"}])
            assert said[0] == status and json.loads(said[1])["error"]["type"].endswith(("ication_error", "sion_error"))
            assert rig.num_seen() == [0] and rig.servers[0].num_tokenised == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("path_", ["/open_session", "/close_session", "/abort_request", "/some/new/path"])
def test_path_when_its_requests_find_others_by_an_id_then_refused_to_tenants(path, path_):
    async def scenario():
        async with serving([server("a")], path) as rig:
            assert (await ask(rig, bearer("a1"), path_, rid="r"))[0] == 403
            assert rig.num_seen() == [0]

    asyncio.run(scenario())


def response(number):
    return {"/v1/responses": (200, "application/json", json.dumps({"id": f"resp_{number}"}).encode())}


def test_response_when_another_tenant_names_it_then_404_and_its_own_finds_it(path):
    async def scenario():
        async with serving([server("a")], path) as rig:
            rig.servers[0].says = response(1)
            await ask(rig, bearer("a1"), "/v1/responses", input="hi")
            for key, status in (("u1", 404), ("a2", 200)):
                follow = {"input": "more", "previous_response_id": "resp_1"}
                assert (await ask(rig, bearer(key), "/v1/responses", **follow))[0] == status
                url = f"{rig.served.url}/v1/responses/resp_1"
                async with rig.client.get(url, headers=bearer(key)) as found:
                    assert found.status == status
                assert (await ask(rig, bearer(key), "/v1/responses/resp_1/cancel"))[0] == status

    asyncio.run(scenario())


@pytest.mark.parametrize("more", [{"input": []}, {"input": None}, {}, {"input": {}}])
def test_response_when_another_tenant_names_it_and_says_nothing_then_404(path, more):
    async def scenario():
        async with serving([server("a")], path) as rig:
            rig.servers[0].says = response(1)
            await ask(rig, bearer("a1"), "/v1/responses", input="hi")
            for key, status in (("u1", 404), ("a2", 200)):
                assert (await ask(rig, bearer(key), "/v1/responses", previous_response_id="resp_1", **more))[
                    0
                ] == status
            assert rig.num_seen() == [2]

    asyncio.run(scenario())


def test_response_when_a_tenant_asks_for_the_tokens_of_what_follows_it_then_the_server_hears_no_router(path):
    async def scenario():
        async with serving([server("a", events=True)], path) as rig:
            (one,) = rig.servers
            one.says = response(1)
            for body in ({"input": "hi"}, {"input": "more", "previous_response_id": "resp_1"}):
                await ask(rig, bearer("a1"), "/v1/responses", **body)
                assert SAID_WITH.is_routers(one.asked_with[TENANT_HEADER])
            forged = {**bearer("u1"), TENANT_HEADER: SAID_WITH.routers_word}
            await ask(rig, forged, "/tokenize", **question("/v1/responses", {"previous_response_id": "resp_1"}))
            assert SAID_WITH.heard(one.asked_with[TENANT_HEADER]) == UMBRELLA
            assert not SAID_WITH.is_routers(one.asked_with[TENANT_HEADER])

    asyncio.run(scenario())


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"[]", 400), (b'{"input": "a", "request_id": "r"}', 403)])
def test_responses_when_a_body_names_or_hides_an_id_then_refused(path, body, status):
    async def scenario():
        async with serving([server("a")], path) as rig:
            url = f"{rig.served.url}/v1/responses"
            async with rig.client.post(url, data=body, headers=bearer("a1")) as answer:
                assert answer.status == status
            assert rig.num_seen() == [0]

    asyncio.run(scenario())


def test_prompt_when_two_tenants_have_sent_it_then_each_goes_where_its_own_pages_are(path):
    async def scenario():
        servers = [server(name, events=True) for name in "ab"]
        async with serving(servers, path, policy="affinity") as rig:
            tokens = list(PROMPT.encode())
            for one, salt in zip(servers, (ACME, UMBRELLA), strict=True):
                stored = list(block_ids(pack(tokens), BLOCK_TOKENS, salt_digests(salted(salt, None))[0]))
                await one.publishers[0].send(BlockStored(stored))
            await until(lambda: all(len(one.feeds[0].blocks) for one in rig.router.fleet.servers))
            for _ in range(3):
                await ask(rig, bearer("a1"), input_ids=tokens)
                await ask(rig, bearer("u1"), input_ids=tokens)
                await ask(rig, bearer("u1"), "/v1/messages", messages=[{"role": "user", "content": PROMPT}])
            assert rig.num_seen() == [3, 6]
            _, metrics = await rig.get("/metrics")
            assert b'banyan_router_tenant_requests_total{tenant="umbrella"} 6.0' in metrics
            assert b'banyan_router_tenant_cached_tokens_total{tenant="acme"} ' in metrics
            assert b'tenant_cached_tokens_total{tenant="acme"} 0.0' not in metrics

    asyncio.run(scenario())


def test_metrics_when_a_tenant_leaves_the_file_then_its_rows_go_and_a_wrong_file_is_told(path, monkeypatch):
    monkeypatch.setattr(tenant_rules, "LOOK_PERIOD_S", 0.02)

    async def scenario():
        async with serving([server("a")], path) as rig:
            for key in ("a1", "u1"):
                await ask(rig, bearer(key), text="hi")
            write(path, FILE.partition("[umbrella]")[0])
            await until(lambda: rig.router.tenant_rules.tenants.keys.tenant("u1") is None)
            await until(lambda: b'tenant="umbrella"' not in rig.router.metrics.render([], 0))
            assert b'tenant="acme"' in rig.router.metrics.render([], 0)
            assert (await ask(rig, bearer("u1"), text="hi"))[0] == 401
            write(path, "nonsense")
            await until(lambda: b"tenants_stale 1.0" in rig.router.metrics.render([], 0))
            assert (await ask(rig, bearer("a1"), text="hi"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(("headers", "status"), [({}, 403), (bearer("a1"), 403), (bearer("ours"), 200)])
def test_metrics_when_asked_from_elsewhere_then_only_the_operators_key_opens_them(path, headers, status):
    async def scenario():
        async with serving([server("a")], path, api_key="ours") as rig:
            passed_on = {"x-forwarded-for": "10.0.0.1", **headers}
            async with rig.client.get(f"{rig.served.url}/metrics", headers=passed_on) as answer:
                assert answer.status == status

    asyncio.run(scenario())


@pytest.mark.parametrize("said", ["", "another"])
def test_server_when_it_would_not_believe_the_router_then_it_takes_no_requests(path, said):
    async def scenario():
        servers = [server("a"), server("b")]
        servers[1].banyan_state = {"tenants": said}
        async with serving(servers, path, is_up=None) as rig:
            one, other = rig.router.fleet.servers
            await until(lambda: one.takes_requests and "tenant" in other.health.last_error)
            assert not other.takes_requests and "--banyan-tenant-secret-file" in other.health.last_error

    asyncio.run(scenario())


@pytest.mark.parametrize("was_one_of_us", [False, True])
def test_request_to_all_servers_when_one_has_another_secret_then_it_hears_nothing_of_a_tenants(path, was_one_of_us):
    async def scenario():
        servers = [server("a"), server("b")]
        servers[1].banyan_state = {"tenants": SAID_WITH.name if was_one_of_us else "another"}
        for one in servers:
            one.says = {"/v1/responses/resp_1": (404, "application/json", b"{}")} | response(1)
        async with serving(servers, path, is_up=was_one_of_us or None) as rig:
            one, other = rig.router.fleet.servers
            if was_one_of_us:
                await servers[1].kill()
                await until(lambda: not other.takes_requests)
                servers[1].banyan_state = {"tenants": "another"}
                await servers[1].come_back()
            await until(lambda: one.takes_requests and "tenant" in other.health.last_error)
            await ask(rig, bearer("a1"), "/v1/responses", input="hi")
            assert (await ask(rig, bearer("a1"), "/banyan/cache", prompt="secret words"))[0] == 502
            async with rig.client.get(f"{rig.served.url}/v1/responses/resp_1", headers=bearer("a1")) as found:
                assert found.status == 404
            assert rig.num_seen() == [3, 0]
            assert (await rig.post("/flush_cache"))[0] == 200
            assert rig.num_seen() == [4, 1], "an operator's is for all"

    asyncio.run(scenario())


def test_server_when_it_has_tenants_and_the_router_none_then_it_takes_no_requests():
    async def scenario():
        async with running([server("a")], is_up=None) as rig:
            (one,) = rig.router.fleet.servers
            await until(lambda: "tenants" in one.health.last_error)
            assert "--tenants-file" in one.health.last_error and not one.takes_requests

    asyncio.run(scenario())


def test_models_when_no_key_is_shown_then_refused_and_counted(path):
    async def scenario():
        async with serving([server("a")], path) as rig:
            assert (await rig.get("/v1/models"))[0] == 401
            assert b'banyan_router_refused_total{status="401"} 1.0' in (await rig.get("/metrics"))[1]
            async with rig.client.get(f"{rig.served.url}/v1/models", headers=bearer("a1")) as answer:
                assert answer.status == 200

    asyncio.run(scenario())


def test_flags_when_the_file_of_the_servers_key_is_empty_then_the_line_names_it(tmp_path):
    empty = tmp_path / "key"
    write(empty, "\n")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(ValueError, match=r"--api-key-file .*key: there is no key in it"):
        take_flags(parser.parse_args(["--server", "http://a:1", "--api-key-file", str(empty)]))


@pytest.mark.parametrize(("mode", "says"), [(0o644, "chmod 600"), (None, "No such file")])
def test_flags_when_the_file_of_the_servers_key_is_not_ours_alone_or_is_not_there_then_the_line_names_it(
    tmp_path, mode, says
):
    key = tmp_path / "key"
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = parser.parse_args(["--server", "http://a:1", "--api-key-file", str(key)])
    if mode is not None:
        key.write_text("k\n")
        key.chmod(mode)
    with pytest.raises(ValueError, match=rf"--api-key-file .*{says}"):
        take_flags(given)
    write(key, "k\n")
    assert take_flags(given).api_key == "k"
