# SPDX-License-Identifier: Apache-2.0
"""Gives each request the salt of its tenant, where a router says whose it is; processes that answer HTTP.

SGLang's forms of requests have a field for a salt, or none (Messages, Ollama's, transcriptions). Here all of them have
become the request that SGLang's processes send each other, and its salt is set in one place.

Invariants
  1. On a server with ``--banyan-tenant-secret-file`` no prompt of a client's enters a cache without its tenant's salt:
     a request whose router does not say it, or that cannot carry it, is answered with status 400. So is one for which
     anything fails here.
  2. What the server asks itself (health checks, a program that it runs in, before it listens a warm-up) shares with
     nobody. The warm-up that comes by HTTP does not take place (``flags``): nothing tells it from a client.
  3. Where SGLang's metrics have the label ``tenant``, it is the name that a router says. No client chooses it, and no
     request of a tenant's stays out of what is counted.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.runtime_context import get_observability

from banyan import faults
from banyan.owner import read_secret
from banyan.routing.headers import TENANT_HEADER, TENANT_NAME_HEADER
from banyan.routing.tenant_secret import SALT_CHARS, TenantSecret, salted
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import clients
from banyan.sglang_plugin.prompt_refusals import BadRequest

TENANT_LABEL = "tenant"
"""Of SGLang's metrics, where ``--tokenizer-metrics-allowed-custom-labels`` names it."""


def admit(obj: Any, request: Any, manager: Any) -> None:
    """Give a request, of SGLang's type for generation or for embedding, its tenant's salt.

    Raises:
        BadRequest: in one line.
    """
    path = _secret_file()
    if not path:
        return
    with clients.refusing(obj):
        try:
            _admit(obj, request, manager, _tenant_secret(path))
        except BadRequest:
            raise
        except Exception as error:
            # Whatever it is, no request is served without its salt.
            faults.note("tenant_salts.admit", error)
            raise BadRequest("this server could not tell whose the request is: its log says why") from error


def salt_for(request: Any, said: str | None) -> str | None:
    """The salt of a command about a prompt, which is no request of SGLang's; ``said``: the client's own.

    Raises:
        BadRequest: where no router says whose it is.
    """
    path = _secret_file()
    return salted(_tenant_of(request, _tenant_secret(path)), said) if path else said


def may_ask_for_others(request: Any) -> bool:
    """Whether what is asked may be about any tenant's: a router asks for itself, or there are no tenants."""
    path = _secret_file()
    return not path or _tenant_secret(path).is_routers(request.headers.get(TENANT_HEADER, ""))


def name_of(path: str) -> str:
    """What a server says of its secret; "" where it has none.

    Raises:
        OSError, ValueError: when the file cannot be used.
    """
    return TenantSecret(read_secret(Path(path))).name if path else ""


def _secret_file() -> str:
    """ "" where this server has no tenants."""
    config = runtime.config()
    return "" if config is None else config.tenant_secret_file


@lru_cache(maxsize=1)
def _tenant_secret(path: str) -> TenantSecret:
    return TenantSecret(read_secret(Path(path)))


def _admit(obj: Any, request: Any, manager: Any, secret: TenantSecret) -> None:
    if _is_own(request, manager):
        if isinstance(obj, GenerateReqInput):
            obj.cache_salt = secrets.token_hex(SALT_CHARS // 2)
            _label(obj, "")
        return
    salt = _tenant_of(request, secret)
    if not isinstance(obj, GenerateReqInput):
        raise BadRequest("this server serves tenants, and SGLang has no salt for what asks for vectors or scores")
    if obj.session_params is not None:
        raise BadRequest("session_params: a session is found by its id, whoever asks: not for tenants")
    obj.cache_salt = _salts(salt, obj.cache_salt)
    _label(obj, request.headers.get(TENANT_NAME_HEADER, ""))


def _label(obj: Any, tenant: str) -> None:
    """Have it counted under this name, "" for all that are nobody's. What is no dictionary is refused later."""
    if TENANT_LABEL not in (get_observability().tokenizer_metrics_allowed_custom_labels or ()):
        return
    if not obj.custom_labels or isinstance(obj.custom_labels, dict):
        obj.custom_labels = {**(obj.custom_labels or {}), TENANT_LABEL: tenant}
    obj.log_metrics = obj.log_metrics or bool(tenant)


def _tenant_of(request: Any, secret: TenantSecret) -> str:
    salt = secret.heard(request.headers.get(TENANT_HEADER, "")) if request is not None else None
    if salt is None:
        raise BadRequest("this server serves tenants: ask their router (banyan route --tenants-file), which knows them")
    return salt


def _is_own(request: Any, manager: Any) -> bool:
    """Whether no client asks. SGLang passes no request on from a websocket either, but nobody listens at one before the
    server is up; in a program it never is."""
    if request is None:
        return manager.server_status is ServerStatus.Starting
    return clients.asks_for_health(request)


def _salts(salt: str, said: Any) -> str | list[str]:
    own = said if isinstance(said, list) else [said]
    if not all(one is None or isinstance(one, str) for one in own):
        raise BadRequest("cache_salt: a text, or one for each prompt")
    salts = [salted(salt, one) for one in own]
    return salts if isinstance(said, list) else salts[0]
