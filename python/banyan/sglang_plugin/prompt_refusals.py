# SPDX-License-Identifier: Apache-2.0
"""What a prompt, its log probabilities and its sampling may be, for SGLang passes on what then ends all ranks.

The main process asks for all that comes by HTTP or from an Engine; a rank asks for itself where clients reach it past
that process. ``docs/security.md`` has the fields and their bounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from banyan import faults
from banyan.sglang_plugin.stop_regex import may_not_end

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


OF_NORMALIZING = ("is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len")
"""Of ``sampling_params``: SGLang makes them of the others, and checks nothing where a client says that it has."""

GRAMMARS = ("regex", "ebnf", "json_schema", "structural_tag")
MOST_GRAMMAR_CHARACTERS = 1 << 18
"""Each rank keeps the texts of the last grammars, those too that are none."""

MOST_AT_A_PLACE, MOST_PROMPT_LOGPROBS = 1 << 14, 1 << 21
"""Log probabilities that are told of: at each place, and of all places of a prompt. They are numbers of Python's in
three processes, and a row on the device for each place."""

MOST_TOP_OF_PAIRS = 128
"""Of the likeliest. What SGLang's prefill server hands over has room for; it ends behind more."""


class BadRequest(ValueError):
    """What SGLang answers with status 400."""


faults.let_pass(BadRequest)


def check_tokenized(asked: Any, vocab_size: int) -> None:
    """A request of one prompt as the ranks get it, of SGLang's type for generation or for embedding.

    Raises:
        ValueError: naming the field.
    """
    if asked.input_ids is not None:
        if not len(asked.input_ids):
            raise BadRequest("a prompt has no tokens")
        check_ids(asked.input_ids, vocab_size if getattr(asked, "mm_inputs", None) is None else END_OF_IDS)
    if getattr(asked, "lora_id", None) is not None:
        # One that is not loaded ends the rank, and pages of an adapter are known by it.
        raise BadRequest("lora_id: an adapter is asked for by lora_path, over HTTP")
    sampling = asked.sampling_params
    check_logprobs(asked, vocab_size, num_prompt_tokens=len(asked.input_ids or ()))
    if sampling is not None:
        sampling.verify(vocab_size)
        params = {field: getattr(sampling, field) for field in (*SAMPLING_RANGES, "logit_bias", *GRAMMARS)}
        params |= {"stop_regex": sampling.stop_regex_strs, "stop_token_ids": list(sampling.stop_token_ids or ())}
        check_sampling(params, vocab_size)


def check_logprobs(obj: Any, vocab_size: int, *, num_prompt_tokens: int, most_top: int = MOST_AT_A_PLACE) -> None:
    """How many log probabilities, from where on, and of which tokens."""
    num_top, start = getattr(obj, "top_logprobs_num", None), getattr(obj, "logprob_start_len", None)
    if num_top is not None and not 0 <= num_top <= vocab_size:
        raise BadRequest(f"top_logprobs_num: {str(num_top)[:32]}, of the model's {vocab_size} tokens")
    if start is not None and start < -1:
        raise BadRequest(f"logprob_start_len: {str(start)[:32]} is neither a place in the prompt nor -1")
    ids = getattr(obj, "token_ids_logprob", None) or ()
    if ids:
        check_ids(ids, vocab_size, "token_ids_logprob")
    told = (num_top or 0) + len(ids)
    if told > MOST_AT_A_PLACE or (num_top or 0) > most_top:
        most = min(MOST_AT_A_PLACE, most_top)
        raise BadRequest(f"top_logprobs_num, token_ids_logprob: {told} tokens at each place, {most} at most")
    chosen = getattr(obj, "token_indices_to_pool", None) or getattr(obj, "multi_item_delimiter_indices", None)
    places = num_prompt_tokens - start if start is not None and start >= 0 else 0
    places = len(chosen) if isinstance(chosen, list) else places
    if told * places > MOST_PROMPT_LOGPROBS:
        raise BadRequest(
            f"top_logprobs_num, token_ids_logprob: {told} tokens at {places} places of the prompt, "
            f"{MOST_PROMPT_LOGPROBS} in all at most: ask for fewer, or for a later logprob_start_len"
        )


def check_sampling(params: dict[str, Any], vocab_size: int) -> None:
    """What clients send as ``sampling_params``."""
    for field in OF_NORMALIZING:
        if field in params:
            raise BadRequest(f"sampling_params: {field} is SGLang's own")
    for field in GRAMMARS:
        text = params.get(field)
        if isinstance(text, str) and len(text) > MOST_GRAMMAR_CHARACTERS:
            raise BadRequest(f"sampling_params: {field} has {len(text)} characters, {MOST_GRAMMAR_CHARACTERS} at most")
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
        check_ids(stops, vocab_size, "sampling_params: stop_token_ids")


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
                f"sampling_params: stop_regex {text[:64]!r} may never end: it has a repeat within a repeat, or repeats "
                "that can take the same letters; write it without, bound them as in {0,9}, or use stop"
            )


def check_is_list(ids: Any) -> None:
    """Of what clients send as ``input_ids``."""
    if isinstance(ids, int | float | str | dict):
        raise BadRequest("input_ids: no list of tokens")


END_OF_IDS = 1 << 31
"""Beyond it are the numbers of what images, videos and sounds become: a prompt that names them itself would be taken
for one with that image in it. Below zero there is no token of any model, and no page key."""


def check_ids(ids: Sequence[Any], vocab_size: int, field: str = "input_ids") -> None:
    """Of one prompt, or of several. What is no list of numbers SGLang refuses itself."""
    nested = [one for one in ids if isinstance(one, list)] if isinstance(ids[0], list) else []
    for one in nested:
        if one:
            check_ids(one, vocab_size, field)
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
