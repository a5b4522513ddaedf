# SPDX-License-Identifier: Apache-2.0
"""Every path of SGLang's HTTP server: whom a request to it goes to, and what decides which.

A path that is not here goes to one server, by load. A test holds the table against the routes of the installed SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from banyan.routing.cache_path import CACHE_PATH


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
        methods: those that SGLang has for it; none where it takes websockets alone.
        is_ours: it changes servers, and only this machine may ask for it.
        empties: what servers had in their pools is not there any more.
        is_routable: its body has SGLang's fields for routers: the rank, and where the two servers of a pair meet.
    """

    path: str
    to: To
    by: By
    methods: tuple[str, ...] = ("POST",)
    form: Form = Form.OPENAI
    is_ours: bool = False
    empties: bool = False
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


def _rows(paths: str, to: To, by: By = By.NOTHING, methods: tuple[str, ...] = ("POST",), **more: Any) -> list[Row]:
    """Paths of which the table says the same."""
    return [Row(path=path, to=to, by=by, methods=methods, **more) for path in paths.split()]


_PLACED_BY_PROMPT = (
    *_rows(GENERATE, To.ONE, By.TOKENS, _POST_PUT, is_routable=True),
    *_rows(COMPLETIONS, To.ONE, By.TOKENS, is_routable=True),
    *_rows(f"{CHAT_COMPLETIONS} /invocations", To.ONE, By.CHAT, is_routable=True),
    *_rows(MESSAGES, To.ONE, By.CONVERTED, form=Form.ANTHROPIC, is_routable=True),
    *_rows(RESPONSES, To.ONE, By.CONVERTED, form=Form.RESPONSES, is_routable=True),
    *_rows("/api/chat /api/generate", To.ONE, By.CONVERTED, form=Form.OLLAMA),
    *_rows("/v1/embeddings /v1/classify", To.ONE, By.TOKENS),
    *_rows("/encode /classify", To.ONE, By.TOKENS, _POST_PUT),
)

_ANY_SERVER_ANSWERS = (
    *_rows("/v1/rerank", To.ONE, By.LOAD, _POST_PUT),
    *_rows("/v1/score /v1/decisions /v1/systemone /vertex_generate /v1/audio/transcriptions", To.ONE, By.LOAD),
    *_rows("/tokenize /v1/tokenize /detokenize /v1/detokenize", To.ONE, By.LOAD),
    *_rows("/v1/messages/count_tokens", To.ONE, By.LOAD, form=Form.ANTHROPIC),
    *_rows("/parse_function_call /separate_reasoning", To.ONE, By.LOAD),
    *_rows("/api/show", To.ONE, By.LOAD, form=Form.OLLAMA),
    *_rows("/api/tags", To.ONE, By.LOAD, _GET, form=Form.OLLAMA),
    *_rows("/ /model_info /get_model_info /v1/models/{model:path}", To.ONE, By.LOAD, _GET),
    *_rows("/openapi.json /docs /docs/oauth2-redirect /redoc", To.ONE, By.LOAD, _GET),
    *_rows("/open_session", To.ONE, By.SESSION, _GET_POST),
)

_CONCERNS_ALL = (
    *_rows("/abort_request", To.EACH),
    *_rows(CACHE_PATH, To.EACH),
    *_rows("/close_session", To.FINDER, methods=_GET_POST),
    *_rows("/v1/responses/{response_id}", To.FINDER, methods=_GET),
    *_rows("/v1/responses/{response_id}/cancel", To.FINDER),
    *_rows(
        "/pause_generation /continue_generation /load_lora_adapter /unload_lora_adapter /update_weight_version "
        "/begin_weight_update /add_external_corpus /remove_external_corpus /hicache/storage-backend/clear",
        To.EACH,
        is_ours=True,
    ),
    *_rows(
        "/resume_memory_occupation /slow_down /configure_logging /start_profile /stop_profile /set_trace_level "
        "/freeze_gc /start_expert_distribution_record /stop_expert_distribution_record "
        "/dump_expert_distribution_record",
        To.EACH,
        methods=_GET_POST,
        is_ours=True,
    ),
    *_rows("/update_weights_from_disk /end_weight_update", To.EACH, is_ours=True, empties=True),
    *_rows("/flush_cache /release_memory_occupation", To.EACH, methods=_GET_POST, is_ours=True, empties=True),
    *_rows("/set_internal_state", To.EACH, methods=_POST_PUT, is_ours=True),
)

_NOT_PASSED_ON = (
    *_rows(f"/health /health_generate /ready /ping {MODELS}", To.ROUTER, methods=_GET),
    *_rows("/server_info /get_server_info /v1/loads /list_external_corpora", To.NOBODY, methods=_GET),
    *_rows("/get_hicache_l3_cache_layout /is_scaling_elastic_ep", To.NOBODY, methods=_GET),
    *_rows("/hicache/storage-backend", To.NOBODY, methods=("DELETE", "GET", "PUT")),
    *_rows("/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info", To.NOBODY, methods=_GET),
    *_rows(
        "/init_weights_update_group /destroy_weights_update_group /update_weights_from_tensor "
        "/update_weights_from_distributed /update_weights_from_ipc /load_lora_adapter_from_tensors "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance /pd_role_switch "
        "/scale_elastic_ep /dumper/{method}",
        To.NOBODY,
    ),
    *_rows("/get_weights_by_name /weights_checker", To.NOBODY, methods=_GET_POST),
    *_rows("/v1/realtime", To.NOBODY, methods=()),
)

ROWS: tuple[Row, ...] = (*_PLACED_BY_PROMPT, *_ANY_SERVER_ANSWERS, *_CONCERNS_ALL, *_NOT_PASSED_ON)

BY_PATH = {row.path: row for row in ROWS}

OTHER = Row(path="other", to=To.ONE, by=By.LOAD, methods=())
"""What stands for all paths that are not in the table."""
