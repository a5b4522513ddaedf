# SPDX-License-Identifier: Apache-2.0
"""On a server with tenants no prompt enters a cache without its tenant's salt."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus

from banyan import faults
from banyan.config import Config
from banyan.routing.headers import TENANT_HEADER
from banyan.routing.tenant_secret import TenantSecret
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import tenant_salts
from banyan.sglang_plugin.prompt_refusals import BadRequest

SECRET = b"0123456789abcdef"
SAID_WITH = TenantSecret(SECRET)
SALT = SAID_WITH.salt_of("tenant", "acme")
SAYS = {TENANT_HEADER: SAID_WITH.word(SALT)}


@pytest.fixture(autouse=True)
def secret(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setattr(runtime, "config", lambda: Config(tenant_secret_file=str(path)))
    tenant_salts._tenant_secret.cache_clear()
    return path


def manager(status=ServerStatus.Up):
    return SimpleNamespace(server_status=status, model_config=SimpleNamespace(vocab_size=320))


def request(headers=SAYS, path="/v1/messages"):
    return SimpleNamespace(headers=headers, scope={"path": path})


def admitted(asked, status=ServerStatus.Up, **fields):
    obj = GenerateReqInput(**{"input_ids": [1, 2], "sampling_params": {}, **fields})
    tenant_salts.admit(obj, asked, manager(status))
    obj.normalize_batch_and_arguments()
    return obj.cache_salt


@pytest.mark.parametrize(
    ("said", "salt"), [(None, SALT), ("", SALT), ("mine", SALT + "mine"), (SALT + "x", SALT + "x")]
)
def test_request_when_a_router_says_its_tenant_then_that_salt_is_in_front_of_its_own(said, salt):
    assert admitted(request(), cache_salt=said) == salt


def test_batch_when_its_prompts_have_salts_then_each_has_the_tenants_too():
    assert admitted(request(), input_ids=[[1], [2]], cache_salt=["a", ""]) == [SALT + "a", SALT]
    assert admitted(request(), input_ids=[[1], [2]]) == [SALT, SALT]


@pytest.mark.parametrize(
    "headers",
    [{}, {TENANT_HEADER: SALT}, {TENANT_HEADER: SALT + SALT}, {TENANT_HEADER: TenantSecret(b"x" * 16).word(SALT)}],
)
def test_request_when_no_router_with_the_secret_says_its_tenant_then_refused(headers):
    with pytest.raises(BadRequest, match="banyan route --tenants-file"):
        admitted(request(headers))


@pytest.mark.parametrize("said", [3, [1, 2], {"a": 1}])
def test_salt_when_it_is_no_text_then_refused(said):
    with pytest.raises(BadRequest, match="cache_salt"):
        admitted(request(), cache_salt=said)


def test_session_when_a_tenant_names_one_then_refused():
    with pytest.raises(BadRequest, match="session_params"):
        admitted(request(), session_params={"id": "a"})


def test_vector_when_a_tenant_asks_for_it_then_refused_and_the_health_check_is_served():
    obj = EmbeddingReqInput(input_ids=[1, 2])
    with pytest.raises(BadRequest, match="vectors"):
        tenant_salts.admit(obj, request(), manager())
    tenant_salts.admit(obj, request({}, "/health"), manager())


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (None, ServerStatus.Up),
        (request({}, "/health"), ServerStatus.Up),
        (request({}, "/health_generate"), ServerStatus.UnHealthy),
        (request({}, "/generate"), ServerStatus.Starting),
    ],
)
def test_request_when_it_is_the_servers_own_then_it_shares_with_nobody(asked, status):
    salts = {admitted(asked, status) for _ in range(3)}
    assert len(salts) == 3 and None not in salts and not any(salt.startswith(SALT) for salt in salts)


def test_request_when_the_secret_cannot_be_read_any_more_then_refused(secret, monkeypatch):
    secret.unlink()
    noted = []
    monkeypatch.setattr(faults, "note", lambda where, error: noted.append(where))
    with pytest.raises(BadRequest, match="could not tell"):
        admitted(request())
    assert noted == ["tenant_salts.admit"]


def test_request_when_there_are_no_tenants_then_its_salt_is_its_own(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())
    assert admitted(request(), cache_salt="mine") == "mine"
    assert admitted(request({})) is None
