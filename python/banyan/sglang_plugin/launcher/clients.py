# SPDX-License-Identifier: Apache-2.0
"""What clients may say to this server, checked once for all its processes; main process.

Invariants
  1. Nothing that a client says is taken for this server's own word: actions of Banyan's types go no further, but for
     the two wishes that a client may have. (The ranks believe marked ones only: ``banyan.sglang_plugin.kv_hints``.)
  2. A wish is well formed, or its request is answered with status 400.
  3. No token id that the model does not have, no prompt without tokens, and no list in place of one value goes further:
     SGLang passes them on, and they end all ranks.
  4. Nobody names an adapter by its id, which its pages are known by.

``docs/security.md`` has the fields, their bounds, and what becomes of a bad value.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope, decode_kv_hints_envelope
from sglang.srt.runtime_context import get_observability

from banyan.planner import asked
from banyan.routing import POLICIES, hint
from banyan.sglang_plugin import prompt_refusals, runtime
from banyan.sglang_plugin.launcher import adapters, taken_ids
from banyan.sglang_plugin.prompt_refusals import MOST_AT_A_PLACE, MOST_TOP_OF_PAIRS, BadRequest

OWN_PREFIX = "banyan."
MAX_ACTIONS = 64
ONE_FOR_A_PROMPT = (
    *("sampling_params", "rid", "lora_path", "lora_id", "extra_key", "cache_salt", "return_logprob", "decode_tp_size"),
    *("logprob_start_len", "top_logprobs_num", "return_sampling_mask", "custom_logit_processor"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
)
"""Fields that are lists for several prompts only."""

MOST_SAMPLES = 4096
"""Of one prompt. SGLang makes as many requests of it at once."""

MOST_SAMPLES_IN_ALL = 1 << 16
"""Of all prompts of a request that wants several of each."""

MOST_PATTERN_CHARACTERS_IN_ALL = 1 << 18
"""Of ``stop_regex``, of all prompts of a request: SGLang takes a pattern apart anew for each of them, and meanwhile
nobody else is served."""


HEALTH_RANKS_PATH = "/health_ranks"
HEALTH_PATHS = ("/health", "/health_generate", HEALTH_RANKS_PATH)
HEALTH_ID = "HEALTH_CHECK"
"""Begins the ids of SGLang's own checks of its health. A busy rank answers none, nor is one ever aborted."""

OF_PROCESSORS = frozenset({"format", "feature", "hash", "pad_value", "padded_input_ids"})
"""Of an image, a video or a sound that a processor has been through: an Engine's program may bring it."""


def admit(obj: Any, request: Any, manager: Any) -> None:
    """Check a request, of SGLang's type for generation or for embedding, and strip it of what is not its to say.
    ``request``: as it came by HTTP; None where a program asks that this server runs in.

    Raises:
        BadRequest: naming the field.
    """
    with refusing(obj):
        _check(obj, manager)
        if request is not None and not asks_for_health(request):
            _check_ids_are_no_checks(obj.rid)
            for field in ("image_data", "video_data", "audio_data"):
                _check_media(field, getattr(obj, field, None))


def asks_for_health(request: Any) -> bool:
    """Whether the server asks itself, on the route of a check of its health."""
    return route_of(getattr(request, "scope", {})) in HEALTH_PATHS


def route_of(scope: Mapping[str, Any]) -> str:
    """A request's path as SGLang's application has it: without ``--fastapi-root-path``."""
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))


@contextlib.contextmanager
def refusing(obj: Any) -> Iterator[None]:
    """In here a request may be refused."""
    try:
        yield
    except BadRequest:
        # SGLang reads it when a stream is over, from a request that it has not seen for itself. Without it the
        # connection breaks, under whoever uses it next.
        obj.is_single = not isinstance(obj.rid, list)
        raise


def before_validate_one_request(manager: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """Each prompt, when its tokens are known. A session may hold those of its next turn.

    Raises:
        BadRequest: for a prompt without tokens, or with tokens that the model does not have, for a list in place of
            what a prompt has once, for log probabilities of more tokens than there are, and for numbers that sampling
            cannot reckon with. SGLang passes all of them on, and they end the rank, and all others with it.
    """
    if runtime.config() is None:
        return
    for field in ONE_FOR_A_PROMPT:
        if isinstance(getattr(obj, field, None), list):
            raise BadRequest(f"{field}: a list, for one prompt")
    # Of several prompts, when some were given as text, SGLang takes single ids for whole prompts.
    prompt_refusals.check_is_list(input_ids)
    is_of_a_pair = runtime.is_of_a_pair()
    prompt_refusals.check_logprobs(
        obj,
        manager.model_config.vocab_size,
        num_prompt_tokens=len(input_ids or ()),
        most_top=MOST_TOP_OF_PAIRS if is_of_a_pair else MOST_AT_A_PLACE,
    )
    sampling = getattr(obj, "sampling_params", None)
    if isinstance(sampling, dict):
        prompt_refusals.check_sampling(sampling, manager.model_config.vocab_size)
    if input_ids is not None and len(input_ids):
        num_ids = prompt_refusals.END_OF_IDS if _has_media(obj, manager) else manager.model_config.vocab_size
        prompt_refusals.check_ids(input_ids, num_ids)
    session = getattr(obj, "session_params", None)
    if input_ids is not None and not len(input_ids) and not (isinstance(session, dict) and session.get("id")):
        raise BadRequest("a prompt has no tokens")
    taken_ids.take(getattr(obj, "rid", None), manager)
    if is_of_a_pair and getattr(obj, "bootstrap_host", None) != FAKE_BOOTSTRAP_HOST:
        taken_ids.take_room(getattr(obj, "bootstrap_room", None), obj.rid)


def check_num_samples(num_samples: Any) -> None:
    """Of one prompt.

    Raises:
        BadRequest: for more than this server makes.
    """
    if not isinstance(num_samples, int | float):
        return
    if num_samples > 1 and runtime.is_of_a_pair():
        # SGLang gives all of them one room, and its rank ends when a second one comes to it.
        raise BadRequest(
            f"sampling_params: n is {str(num_samples)[:32]}, and a pair of servers makes one sample of a prompt: "
            "send the prompt as often"
        )
    if num_samples > MOST_SAMPLES:
        raise BadRequest(f"sampling_params: n is {str(num_samples)[:32]}, {MOST_SAMPLES} at most")


def _check_samples(obj: Any) -> None:
    sampling = getattr(obj, "sampling_params", None)
    for params in sampling if isinstance(sampling, list) else [sampling]:
        num_samples = params.get("n") if isinstance(params, dict) else None
        check_num_samples(num_samples)
        if isinstance(num_samples, int) and num_samples > 1 and num_samples * _num_prompts(obj) > MOST_SAMPLES_IN_ALL:
            raise BadRequest(
                f"sampling_params: n is {num_samples}, for {_num_prompts(obj)} prompts: {MOST_SAMPLES_IN_ALL} samples "
                "of one request at most"
            )


def _check_patterns(obj: Any) -> None:
    sampling = getattr(obj, "sampling_params", None)
    if isinstance(sampling, list):
        num_characters = sum(map(_pattern_characters, sampling))
    else:
        num_characters = _num_prompts(obj) * _pattern_characters(sampling)
    if num_characters > MOST_PATTERN_CHARACTERS_IN_ALL:
        raise BadRequest(
            f"sampling_params: stop_regex: {num_characters} characters of all prompts, "
            f"{MOST_PATTERN_CHARACTERS_IN_ALL} at most: send fewer prompts at once"
        )


def _pattern_characters(params: Any) -> int:
    patterns = params.get("stop_regex") if isinstance(params, dict) else None
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return sum(len(one) for one in patterns if isinstance(one, str)) if isinstance(patterns, list) else 0


def _num_prompts(obj: Any) -> int:
    texts, ids, embeds = (getattr(obj, name, None) for name in ("text", "input_ids", "input_embeds"))
    # One prompt's own are a number, or a row of numbers, for each of its tokens.
    ids = None if isinstance(_first(ids), int) else ids
    embeds = None if isinstance(_first(_first(embeds)), float) else embeds
    return max([1, *(len(one) for one in (texts, ids, embeds) if isinstance(one, list))])


def _first(said: Any) -> Any:
    return said[0] if isinstance(said, list) and said else None


def _check(obj: Any, manager: Any) -> None:
    prompt_refusals.check_is_list(obj.input_ids)
    if obj.input_ids and _has_media(obj, manager):
        # SGLang's processors take them as they come, or make something of them first.
        prompt_refusals.check_ids(obj.input_ids, prompt_refusals.END_OF_IDS)
    names_adapter = adapters.named_by(getattr(obj, "extra_key", None), manager)
    if names_adapter:
        raise BadRequest("extra_key: it contains the id of a LoRA adapter: ask for one with lora_path")
    if getattr(obj, "lora_id", None) is not None:
        # SGLang enters it itself. It is a part of the keys of an adapter's pages.
        raise BadRequest("lora_id: ask for an adapter with lora_path")
    _check_id(obj)
    if getattr(obj, "mm_hashes", None) and getattr(obj, "cache_salt", None):
        # Ranks keep what images become by that name alone. A client that is kept apart names them to itself only.
        obj.mm_hashes = None
    if not isinstance(obj.received_time, float) or not math.isfinite(obj.received_time):
        # SGLang's own, but for routes that pass on what a client says. Times are reckoned with it.
        obj.received_time = None
    _check_labels(getattr(obj, "custom_labels", None))
    _check_samples(obj)
    _check_patterns(obj)
    hints = getattr(obj, "kv_hints", None)
    if hints:
        obj.kv_hints = [_allowed(one) for one in hints] if isinstance(hints, list) else _allowed(hints)


def _check_id(obj: Any) -> None:
    """Every id begins with an empty one: an abort of it would be one of all."""
    if obj.rid == "":
        obj.rid = None
    elif isinstance(obj.rid, list) and "" in obj.rid:
        raise BadRequest("rid: an empty one: leave it out")


def _check_ids_are_no_checks(rid: Any) -> None:
    for one in rid if isinstance(rid, list) else [rid]:
        if isinstance(one, str) and one.startswith(HEALTH_ID):
            raise BadRequest(f"rid: {HEALTH_ID} begins those of the server's own checks")


def _check_media(field: str, media: Any) -> None:
    """A rank takes what says that it was processed as it comes."""
    if isinstance(media, list):
        for one in media:
            _check_media(field, one)
    elif isinstance(media, dict) and OF_PROCESSORS & media.keys():
        raise BadRequest(f"{field}: an image, a video or a sound as it is, and not what a processor makes of it")


def _check_labels(labels: Any) -> None:
    """Of this request's metrics. With one that they do not have, SGLang's main process ends while it counts."""
    if not labels:
        return
    allowed = get_observability().tokenizer_metrics_allowed_custom_labels or ()
    if not isinstance(labels, dict) or not all(name in allowed for name in labels):
        raise BadRequest("custom_labels: names of --tokenizer-metrics-allowed-custom-labels, with a text for each")
    if not all(isinstance(value, str) for value in labels.values()):
        raise BadRequest("custom_labels: a text for each name")


def _has_media(obj: Any, manager: Any) -> bool:
    """Some models stand for an image, a video or a sound with ids beyond their vocabulary. Of what is none SGLang's
    processor makes nothing, and neither does a model that has no processor: such ids would go to the ranks as they are.
    """
    return getattr(manager, "mm_processor", None) is not None and bool(obj.contains_mm_input())


def _allowed(hints: Any) -> Any:
    """The hints without what only this server may say. What is no envelope SGLang refuses itself."""
    try:
        envelope = decode_kv_hints_envelope(hints)
    except ValueError:
        return hints
    if len(envelope.actions) > MAX_ACTIONS:
        raise BadRequest(f"kv_hints: {len(envelope.actions)} actions, {MAX_ACTIONS} at most")
    kept = [action for action in envelope.actions if _is_allowed(action)]
    if len(kept) == len(envelope.actions):
        return envelope
    return KvHintsEnvelope(protocol_version=envelope.protocol_version, message_id=envelope.message_id, actions=kept)


def _is_allowed(action: KvHintAction) -> bool:
    if action.action_type == hint.POLICY_ACTION:
        _check_wished_policy(action.payload)
    elif action.action_type == asked.ACTION_TYPE:
        if asked.from_payload(action.payload) is None:
            raise BadRequest(f"kv_hints: {asked.ACTION_TYPE} is asked for with action: move or compute")
    else:
        return not action.action_type.startswith(OWN_PREFIX)
    return True


def _check_wished_policy(wish: dict[str, Any]) -> None:
    name = wish.get("policy")
    if name is not None and not (isinstance(name, str) and name in POLICIES):
        raise BadRequest(f"kv_hints: policy {str(name)[:64]!r} is none of {', '.join(POLICIES)}")
