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

import re
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope, decode_kv_hints_envelope
from sglang.srt.runtime_context import get_observability

from banyan import faults
from banyan.planner import asked
from banyan.routing import POLICIES, hint
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import adapters
from banyan.sglang_plugin.launcher.stop_regex import may_not_end

OWN_PREFIX = "banyan."
MAX_ACTIONS = 64
ONE_FOR_A_PROMPT = (
    *("sampling_params", "rid", "lora_path", "lora_id", "extra_key", "cache_salt", "return_logprob", "decode_tp_size"),
    *("logprob_start_len", "top_logprobs_num", "return_sampling_mask", "custom_logit_processor"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
)
"""Fields that are lists for several prompts only."""

SAMPLING_RANGES = {
    "temperature": (0.0, 1e20),
    "repetition_penalty": (1e-6, 2.0),
    "top_k": (-(2**31), 2**31 - 1),
    "max_new_tokens": (0, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
}
"""What sampling can reckon with in 32 bits: two of these divide logits. SGLang checks what is narrower itself."""

MOST_BIAS = 1e20

MOST_PATTERNS, MOST_PATTERN_CHARACTERS = 32, 256
"""SGLang's own bounds, which it looks at after this: to take a pattern apart takes time."""

MOST_SAMPLES = 4096
"""Of one prompt. SGLang makes as many requests of it at once."""


class BadRequest(ValueError):
    """What SGLang answers with status 400."""


faults.let_pass(BadRequest)


def admit(obj: Any, manager: Any) -> None:
    """Check a request, of SGLang's type for generation or for embedding, and strip it of what is not its to say.

    Raises:
        BadRequest: naming the field.
    """
    try:
        _check(obj, manager)
    except BadRequest:
        # SGLang reads it when a stream is over, from a request that it has not seen for itself. Without it the
        # connection breaks, under whoever uses it next.
        obj.is_single = not isinstance(obj.rid, list)
        raise


def before_validate_one_request(manager: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """Each prompt, when its tokens are known. A session may hold those of its next turn.

    Raises:
        BadRequest: for a prompt without tokens, for a list in place of what a prompt has once, for log probabilities
            of more tokens than there are, and for numbers that sampling cannot reckon with. SGLang passes all of them
            on, and they end the rank, and all others with it.
    """
    if runtime.config() is None:
        return
    for field in ONE_FOR_A_PROMPT:
        if isinstance(getattr(obj, field, None), list):
            raise BadRequest(f"{field}: a list, for one prompt")
    _check_logprobs(obj, manager.model_config.vocab_size)
    sampling = getattr(obj, "sampling_params", None)
    if isinstance(sampling, dict):
        _check_sampling(sampling, manager.model_config.vocab_size)
    # Of several prompts, when some were given as text, SGLang takes single ids for whole prompts.
    _check_is_list(input_ids)
    session = getattr(obj, "session_params", None)
    if input_ids is not None and not len(input_ids) and not (isinstance(session, dict) and session.get("id")):
        raise BadRequest("a prompt has no tokens")


def _check_logprobs(obj: Any, vocab_size: int) -> None:
    num_top, start = getattr(obj, "top_logprobs_num", None), getattr(obj, "logprob_start_len", None)
    if num_top is not None and not 0 <= num_top <= vocab_size:
        raise BadRequest(f"top_logprobs_num: {str(num_top)[:32]}, of the model's {vocab_size} tokens")
    if start is not None and start < -1:
        raise BadRequest(f"logprob_start_len: {str(start)[:32]} is neither a place in the prompt nor -1")
    if getattr(obj, "token_ids_logprob", None):
        _check_ids(obj.token_ids_logprob, vocab_size, "token_ids_logprob")


def _check_sampling(params: dict[str, Any], vocab_size: int) -> None:
    for field, (least, most) in SAMPLING_RANGES.items():
        value = params.get(field)
        # What is no number SGLang refuses itself.
        if isinstance(value, int | float) and not least <= value <= most:
            raise BadRequest(f"sampling_params: {field} is {str(value)[:32]}, not from {least:g} to {most:g}")
    bias = params.get("logit_bias")
    for value in bias.values() if isinstance(bias, dict) else ():
        if isinstance(value, int | float) and not -MOST_BIAS <= value <= MOST_BIAS:
            raise BadRequest(f"sampling_params: logit_bias has {str(value)[:32]}, beyond {MOST_BIAS:g}")
    patterns = params.get("stop_regex")
    if isinstance(patterns, str | list):
        _check_patterns([patterns] if isinstance(patterns, str) else patterns)
    stops = params.get("stop_token_ids")
    if stops and isinstance(stops, list):
        _check_ids(stops, vocab_size, "sampling_params: stop_token_ids")


def _check_patterns(patterns: Sequence[Any]) -> None:
    texts = [pattern for pattern in patterns if isinstance(pattern, str)]
    if len(texts) > MOST_PATTERNS or any(len(text) > MOST_PATTERN_CHARACTERS for text in texts):
        raise BadRequest(
            f"sampling_params: stop_regex: {MOST_PATTERNS} patterns of {MOST_PATTERN_CHARACTERS} characters at most"
        )
    for text in texts:
        try:
            endless = may_not_end(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadRequest(f"sampling_params: stop_regex: {error}") from None
        if endless:
            raise BadRequest(
                f"sampling_params: stop_regex {text[:64]!r} has a repeat within a repeat, which may never end: write "
                "it without, or use stop"
            )


def _check_samples(sampling: Any) -> None:
    for params in sampling if isinstance(sampling, list) else [sampling]:
        num_samples = params.get("n") if isinstance(params, dict) else None
        if isinstance(num_samples, int | float) and num_samples > MOST_SAMPLES:
            raise BadRequest(f"sampling_params: n is {str(num_samples)[:32]}, {MOST_SAMPLES} at most")


def _check(obj: Any, manager: Any) -> None:
    _check_is_list(obj.input_ids)
    if obj.input_ids and not _has_media(obj):
        _check_ids(obj.input_ids, manager.model_config.vocab_size)
    names_adapter = adapters.named_by(getattr(obj, "extra_key", None), manager)
    if names_adapter:
        raise BadRequest("extra_key: it contains the id of a LoRA adapter: ask for one with lora_path")
    if getattr(obj, "lora_id", None) is not None:
        # SGLang enters it itself. It is a part of the keys of an adapter's pages.
        raise BadRequest("lora_id: ask for an adapter with lora_path")
    _check_labels(getattr(obj, "custom_labels", None))
    _check_samples(getattr(obj, "sampling_params", None))
    hints = getattr(obj, "kv_hints", None)
    if hints:
        obj.kv_hints = [_allowed(one) for one in hints] if isinstance(hints, list) else _allowed(hints)


def _check_labels(labels: Any) -> None:
    """Of this request's metrics. With one that they do not have, SGLang's main process ends while it counts."""
    if not labels:
        return
    allowed = get_observability().tokenizer_metrics_allowed_custom_labels or ()
    if not isinstance(labels, dict) or not all(name in allowed for name in labels):
        raise BadRequest("custom_labels: names of --tokenizer-metrics-allowed-custom-labels, with a text for each")
    if not all(isinstance(value, str) for value in labels.values()):
        raise BadRequest("custom_labels: a text for each name")


def _check_is_list(ids: Any) -> None:
    if isinstance(ids, int | float | str | dict):
        raise BadRequest("input_ids: no list of tokens")


def _has_media(obj: Any) -> bool:
    """Some models stand for an image, a video or a sound with ids beyond their vocabulary."""
    return any(getattr(obj, field, None) is not None for field in ("image_data", "video_data", "audio_data"))


def _check_ids(ids: Sequence[Any], vocab_size: int, field: str = "input_ids") -> None:
    """Of one prompt, or of several. What is no list of numbers SGLang refuses itself."""
    nested = [one for one in ids if isinstance(one, list)] if isinstance(ids[0], list) else []
    for one in nested:
        if one:
            _check_ids(one, vocab_size, field)
    if nested:
        return
    try:
        least, most = min(ids), max(ids)
        is_known = least >= 0 and most < vocab_size
    except TypeError:
        return
    if not is_known:
        wrong = least if least < 0 else most
        raise BadRequest(f"{field}: {str(wrong)[:32]} is none of the model's {vocab_size} tokens")


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
