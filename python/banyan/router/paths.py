# SPDX-License-Identifier: Apache-2.0
"""Every path of SGLang's HTTP server: whom a request to it goes to, and what decides which.

A path that is not here goes to one server, by load. A test holds the table against the routes of the installed SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class To(StrEnum):
    """Who gets a request."""

    ONE = "one server"
    EACH = "all servers; the answer is the first refusal, else the first server's"
    FINDER = "all servers; the answer is the first that is no refusal"
    ROUTER = "the router answers"
    NOBODY = "404: ask the server itself"


class By(StrEnum):
    """What decides which server gets it."""

    TOKENS = "the tokens in the body, or those of its text"
    CHAT = "the tokens of the chat, as a server renders it"
    CONVERTED = "the tokens of the chat that a server that runs Banyan makes of it; at any other the text"
    SESSION = "the session, else load"
    LOAD = "load"
    NOTHING = "-"


class Form(StrEnum):
    """Whose form errors have that the router gives in a server's place."""

    OPENAI = "OpenAI"
    RESPONSES = "OpenAI's Responses"
    ANTHROPIC = "Anthropic"
    OLLAMA = "Ollama"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path, as Starlette writes it.

    Attributes:
        methods: those that SGLang has for it.
        is_ours: it changes servers, and only this machine may ask for it.
        is_routable: its body has SGLang's fields for routers: the rank, and where the two servers of a pair meet.
    """

    path: str
    to: To
    by: By
    methods: tuple[str, ...] = ("POST",)
    form: Form = Form.OPENAI
    is_ours: bool = False
    is_routable: bool = False

    @property
    def generates(self) -> bool:
        """Whether an engine runs for it: a server of a pair alone could not."""
        return self.by in (By.TOKENS, By.CHAT, By.CONVERTED)


GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
MODELS = "/v1/models"

_GET = ("GET",)
_GET_POST = ("GET", "POST")
_POST_PUT = ("POST", "PUT")


def _prompts() -> Iterator[Row]:
    """What is placed by its prompt."""
    one = To.ONE
    yield Row(path=GENERATE, to=one, by=By.TOKENS, methods=_POST_PUT, is_routable=True)
    yield Row(path=COMPLETIONS, to=one, by=By.TOKENS, is_routable=True)
    for path in (CHAT_COMPLETIONS, "/invocations"):
        yield Row(path=path, to=one, by=By.CHAT, is_routable=True)
    yield Row(path=MESSAGES, to=one, by=By.CONVERTED, form=Form.ANTHROPIC, is_routable=True)
    yield Row(path=RESPONSES, to=one, by=By.CONVERTED, form=Form.RESPONSES, is_routable=True)
    for path in ("/api/chat", "/api/generate"):
        yield Row(path=path, to=one, by=By.CONVERTED, form=Form.OLLAMA)
    for path in ("/v1/embeddings", "/v1/classify"):
        yield Row(path=path, to=one, by=By.TOKENS)
    for path in ("/encode", "/classify"):
        yield Row(path=path, to=one, by=By.TOKENS, methods=_POST_PUT)


def _by_load() -> Iterator[Row]:
    """What any server can answer."""
    yield Row(path="/v1/rerank", to=To.ONE, by=By.LOAD, methods=_POST_PUT)
    for path in ("/v1/score", "/v1/decisions", "/v1/systemone", "/vertex_generate", "/v1/audio/transcriptions"):
        yield Row(path=path, to=To.ONE, by=By.LOAD)
    for path in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"):
        yield Row(path=path, to=To.ONE, by=By.LOAD)
    yield Row(path="/v1/messages/count_tokens", to=To.ONE, by=By.LOAD, form=Form.ANTHROPIC)
    for path in ("/parse_function_call", "/separate_reasoning"):
        yield Row(path=path, to=To.ONE, by=By.LOAD)
    yield Row(path="/api/show", to=To.ONE, by=By.LOAD, form=Form.OLLAMA)
    yield Row(path="/api/tags", to=To.ONE, by=By.LOAD, methods=_GET, form=Form.OLLAMA)
    for path in ("/", "/model_info", "/get_model_info", "/v1/models/{model:path}"):
        yield Row(path=path, to=To.ONE, by=By.LOAD, methods=_GET)
    for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"):
        yield Row(path=path, to=To.ONE, by=By.LOAD, methods=_GET)
    yield Row(path="/open_session", to=To.ONE, by=By.SESSION, methods=_GET_POST)


_OURS_POST = (
    *("/pause_generation", "/continue_generation", "/load_lora_adapter", "/unload_lora_adapter"),
    *("/update_weights_from_disk", "/update_weight_version", "/begin_weight_update", "/end_weight_update"),
    *("/add_external_corpus", "/remove_external_corpus", "/hicache/storage-backend/clear"),
)
_OURS = (
    *("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/slow_down", "/configure_logging"),
    *("/start_profile", "/stop_profile", "/set_trace_level", "/freeze_gc", "/start_expert_distribution_record"),
    *("/stop_expert_distribution_record", "/dump_expert_distribution_record"),
)


def _to_all() -> Iterator[Row]:
    """What concerns every server, or the one that has something of that name."""
    yield Row(path="/abort_request", to=To.EACH, by=By.NOTHING)
    yield Row(path="/close_session", to=To.FINDER, by=By.NOTHING, methods=_GET_POST)
    yield Row(path="/v1/responses/{response_id}", to=To.FINDER, by=By.NOTHING, methods=_GET)
    yield Row(path="/v1/responses/{response_id}/cancel", to=To.FINDER, by=By.NOTHING)
    for path in _OURS_POST:
        yield Row(path=path, to=To.EACH, by=By.NOTHING, is_ours=True)
    for path in _OURS:
        yield Row(path=path, to=To.EACH, by=By.NOTHING, methods=_GET_POST, is_ours=True)
    yield Row(path="/set_internal_state", to=To.EACH, by=By.NOTHING, methods=_POST_PUT, is_ours=True)


def _not_passed_on() -> Iterator[Row]:
    """The router's own, and what is about one server or its ranks."""
    for path in ("/health", "/health_generate", "/ready", "/ping", MODELS):
        yield Row(path=path, to=To.ROUTER, by=By.NOTHING, methods=_GET)
    for path in ("/server_info", "/get_server_info", "/v1/loads", "/list_external_corpora"):
        yield Row(path=path, to=To.NOBODY, by=By.NOTHING, methods=_GET)
    for path in ("/get_hicache_l3_cache_layout", "/is_scaling_elastic_ep"):
        yield Row(path=path, to=To.NOBODY, by=By.NOTHING, methods=_GET)
    yield Row(path="/hicache/storage-backend", to=To.NOBODY, by=By.NOTHING, methods=("DELETE", "GET", "PUT"))
    for path in ("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"):
        yield Row(path=path, to=To.NOBODY, by=By.NOTHING, methods=_GET)
    for path in (
        *("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_tensor"),
        *("/update_weights_from_distributed", "/update_weights_from_ipc", "/load_lora_adapter_from_tensors"),
        *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        *("/pd_role_switch", "/scale_elastic_ep", "/dumper/{method}"),
    ):
        yield Row(path=path, to=To.NOBODY, by=By.NOTHING)
    for path in ("/get_weights_by_name", "/weights_checker"):
        yield Row(path=path, to=To.NOBODY, by=By.NOTHING, methods=_GET_POST)
    yield Row(path="/v1/realtime", to=To.NOBODY, by=By.NOTHING, methods=())


ROWS: tuple[Row, ...] = (*_prompts(), *_by_load(), *_to_all(), *_not_passed_on())

BY_PATH = {row.path: row for row in ROWS}

OTHER = Row(path="other", to=To.ONE, by=By.LOAD, methods=())
"""What stands for all paths that are not in the table."""


def table() -> str:
    """The rows for people, those that are alike together: a part of ``docs/router.md``."""
    groups: dict[tuple[To, By, bool], list[str]] = {}
    for row in (*ROWS, OTHER):
        groups.setdefault((row.to, row.by, row.is_ours), []).append(row.path)
    lines = ["| paths | go to | placed by |", "|---|---|---|"]
    for (to, by, is_ours), paths in groups.items():
        named = ", ".join(f"`{path}`" if path != OTHER.path else "any other path" for path in paths)
        whom = f"{to.value}. Only this machine may ask" if is_ours else to.value
        lines.append(f"| {named} | {whom} | {by.value} |")
    return "\n".join(lines) + "\n"
