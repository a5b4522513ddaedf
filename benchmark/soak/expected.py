# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens are known: a server that shares nothing has said them, one request at a time.

A server that is asked much at once multiplies other shapes, so the last bits of its logits differ, with any cache
(docs/design/0003). In float32 these differences are some 1e-5, so the prompts that are kept are those whose tokens were
all chosen by more than MIN_MARGIN. Then another token means another KV.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.modes.asking import post
from benchmark.modes.models import random_prompt

NUM_STEMS, NUM_TAILS = 8, 14
STEM_TOKENS, TAIL_TOKENS = (48, 700), (18, 220)
NUM_TOKENS = 8
MIN_MARGIN = 0.01
"""Between the logits of the two likeliest tokens, wherever one is chosen."""

MAX_APART = 1e-3
"""Between log probabilities of one prompt's tokens, computed in different company."""

GREEDY: Mapping[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Known:
    """A prompt and what must be said to it. `input_logprobs`: of its own tokens, None for the first."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    input_logprobs: tuple[float | None, ...]
    adapter: str | None = None


def prompts(seed: int) -> list[list[int]]:
    """A small forest: beginnings that several prompts share."""
    drawn = random.Random(seed)
    stems = [random_prompt(drawn, drawn.randrange(*STEM_TOKENS)) for _ in range(NUM_STEMS)]
    return [stem + random_prompt(drawn, drawn.randrange(*TAIL_TOKENS)) for stem in stems for _ in range(NUM_TAILS)]


def learn(url: str, asked: Sequence[Sequence[int]], adapter: str | None) -> list[Known]:
    """What the server at `url` says to each prompt, without those that it was in doubt about."""
    answers = ((ids, post(f"{url}/generate", _body(ids, adapter))) for ids in asked)
    return [known(ids, answer, adapter) for ids, answer in answers if margin(answer["meta_info"]) > MIN_MARGIN]


def known(ids: Sequence[int], answer: Mapping[str, Any], adapter: str | None) -> Known:
    told = answer["meta_info"]["input_token_logprobs"]
    return Known(tuple(ids), tuple(answer["output_ids"]), answer["text"], tuple(one[0] for one in told), adapter)


def margin(meta: Mapping[str, Any]) -> float:
    """How far the likeliest token was ahead of the next one, where it was closest."""
    return min(first[0] - second[0] for first, second in meta["output_top_logprobs"])


def complaint(known: Known, tokens: Sequence[int], *, is_whole: bool) -> str:
    """What is wrong with an answer; nothing where it is right. An answer that was cut short must begin as expected."""
    expected = known.tokens if is_whole else known.tokens[: len(tokens)]
    if tuple(tokens) == expected:
        return ""
    place = next((at for at, (a, b) in enumerate(itertools.zip_longest(tokens, expected)) if a != b), 0)
    return f"prompt of {len(known.ids)} tokens: token {place} differs: {list(tokens)} instead of {list(expected)}"


def logprob_complaint(known: Known, start: int, told: Sequence[Sequence[Any]]) -> str:
    """The same of log probabilities of the prompt's tokens from `start` on. SGLang has none for the first one."""
    expected = known.input_logprobs[start:]
    if len(told) != len(expected):
        return f"{len(told)} log probabilities of {len(expected)}"
    apart = [abs(one[0] - other) for one, other in zip(told[1:], expected[1:], strict=True) if other is not None]
    widest = max(apart, default=0.0)
    return f"log probabilities of the prompt differ by {widest:.5f}" if widest > MAX_APART else ""


def _body(ids: Sequence[int], adapter: str | None) -> dict[str, Any]:
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    return {"input_ids": list(ids), "sampling_params": dict(GREEDY), "lora_path": adapter, **logprobs}
