# SPDX-License-Identifier: Apache-2.0
"""On a server with tenants no prompt enters a cache without its tenant's salt."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager

from banyan import faults
from banyan.config import Config
from banyan.routing.headers import TENANT_HEADER, TENANT_NAME_HEADER
from banyan.routing.tenant_secret import TenantSecret
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import clients, rerun, tenant_salts
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
    have_labels(monkeypatch)
    tenant_salts._tenant_secret.cache_clear()
    return path


def have_labels(monkeypatch, *names):
    """The labels that clients may name of SGLang's metrics."""
    allowed = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=list(names) or None)
    monkeypatch.setattr(tenant_salts, "get_observability", lambda: allowed)


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
        (None, ServerStatus.Starting),
        (request({}, "/health"), ServerStatus.Up),
        (request({}, "/health_generate"), ServerStatus.UnHealthy),
    ],
)
def test_request_when_it_is_the_servers_own_then_it_shares_with_nobody(asked, status):
    salts = {admitted(asked, status) for _ in range(3)}
    assert len(salts) == 3 and None not in salts and not any(salt.startswith(SALT) for salt in salts)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        # As of a websocket (/v1/realtime).
        (None, ServerStatus.Up),
        (None, ServerStatus.UnHealthy),
        (request({}, "/generate"), ServerStatus.Starting),
    ],
)
def test_request_when_a_client_might_have_sent_it_then_it_is_not_taken_for_the_servers_own(asked, status):
    with pytest.raises(BadRequest, match="banyan route --tenants-file"):
        admitted(asked, status)


def test_request_when_the_secret_cannot_be_read_any_more_then_refused(secret, monkeypatch):
    secret.unlink()
    noted = []
    monkeypatch.setattr(faults, "note", lambda where, error: noted.append(where))
    with pytest.raises(BadRequest, match="could not tell"):
        admitted(request())
    assert noted == ["tenant_salts.admit"]


def test_request_when_another_check_of_it_fails_and_sglang_serves_it_then_with_its_tenants_salt(monkeypatch):
    monkeypatch.setattr(clients, "admit", lambda obj, manager: 1 / 0)
    salts = []

    async def serve(manager, obj, request):
        salts.append(obj.cache_salt)
        yield "an answer"

    async def ask(headers):
        hook = faults.around(rerun.around_generate_request, "generate")
        obj = GenerateReqInput(input_ids=[1, 2], sampling_params={})
        return [answer async for answer in hook(serve, manager(), obj, request(headers))]

    assert asyncio.run(ask(SAYS)) == ["an answer"] and salts == [SALT]
    with pytest.raises(BadRequest):
        asyncio.run(ask({}))


def test_request_when_there_are_no_tenants_then_its_salt_is_its_own(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())
    assert admitted(request(), cache_salt="mine") == "mine"
    assert admitted(request({})) is None


NAMED = {**SAYS, TENANT_NAME_HEADER: "acme"}


@pytest.mark.parametrize(
    ("asked", "status", "said", "labels"),
    [
        (request(NAMED), ServerStatus.Up, None, {"tenant": "acme"}),
        (request(NAMED), ServerStatus.Up, {"tenant": "umbrella", "app": "a"}, {"tenant": "acme", "app": "a"}),
        (request(SAYS), ServerStatus.Up, {"tenant": "umbrella"}, {"tenant": ""}),
        (None, ServerStatus.Starting, {"tenant": "umbrella"}, {"tenant": ""}),
        (request(NAMED), ServerStatus.Up, ["tenant"], ["tenant"]),
    ],
)
def test_labels_when_metrics_have_one_for_tenants_then_the_router_says_it_and_no_client(
    monkeypatch, asked, status, said, labels
):
    have_labels(monkeypatch, "app", "tenant")
    obj = GenerateReqInput(input_ids=[[1], [2]], sampling_params={}, custom_labels=said)
    tenant_salts.admit(obj, asked, manager(status))
    obj.normalize_batch_and_arguments()
    assert [one.custom_labels for one in (obj, obj[0], obj[1])] == [labels] * 3


def test_labels_when_metrics_have_none_for_tenants_then_left_as_they_are(monkeypatch):
    have_labels(monkeypatch, "app")
    obj = GenerateReqInput(input_ids=[1], sampling_params={}, custom_labels={"app": "a"}, log_metrics=False)
    tenant_salts.admit(obj, request(NAMED), manager())
    assert obj.custom_labels == {"app": "a"} and not obj.log_metrics


def test_request_when_its_client_would_not_be_counted_then_sglang_counts_it_under_its_tenant_all_the_same(monkeypatch):
    have_labels(monkeypatch, "tenant")
    obj = GenerateReqInput(input_ids=[1], sampling_params={}, log_metrics=False)
    tenant_salts.admit(obj, request(NAMED), manager())
    assert obj.log_metrics
    counted = []
    collector = SimpleNamespace(
        labels={"model_name": "m", "tenant": ""},
        observe_inter_token_latency=lambda *_: None,
        observe_one_finished_request=lambda labels, prompt, completion, cached, *_, **__: counted.append(
            (labels, prompt, cached)
        ),
    )
    times = SimpleNamespace(
        get_interval=float, set_last_time=float, get_e2e_latency=float, get_time_per_output_token=float
    )
    state = SimpleNamespace(obj=obj, finished=True, ttft_observed=True, last_completion_tokens=0, time_stats=times)
    answer = SimpleNamespace(finished_reasons=[None], prompt_tokens=[640], cached_tokens=[512])
    counts = SimpleNamespace(
        metrics_collector=collector,
        enable_priority_scheduling=False,
        disaggregation_mode=None,
        _request_has_grammar=lambda obj: False,
    )
    TokenizerManager.collect_metrics(counts, state, answer, 0)
    assert counted == [({"model_name": "m", "tenant": "acme"}, 640, 512)]
