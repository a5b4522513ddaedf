# SPDX-License-Identifier: Apache-2.0
"""What a server of a mode is asked, and how its answers are compared: the same questions, one at a time, first at one
rank and then at another, to a server that shares and to one that does not."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from benchmark.modes.models import FIRST_PLAIN_TOKEN, VOCABULARY

NUM_PROMPTS = 8
SHORTEST, LONGEST = 200, 480
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
GRAMMAR = "[01]+"
SOURCES = ("device", "peer", "host", "storage")
TIMEOUT_S = 120.0
LOGIT_TOLERANCE = 0.05
"""Log probabilities of first tokens, when both ranks work, against those of a rank that works alone: the rows of all
ranks go through one matrix product, which rounds in bf16 by their number."""

Ask = Callable[[Sequence[int], int | None], "Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`said`: what must be equal; `cached`: cached tokens by where they came from."""

    said: tuple[float, ...]
    cached: dict[str, int] = field(default_factory=dict)
    first_log_probability: float = 0.0


def prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    """Token ids; no two share a page."""
    drawn = random.Random(20)
    return [
        [drawn.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(drawn.randrange(SHORTEST, LONGEST))]
        for _ in range(count)
    ]


def tokens(url: str, *, adapter: str | None = None) -> Ask:
    """Asks `url` for greedy tokens."""

    def ask(ids: Sequence[int], rank: int | None) -> Answer:
        return answer_of(_generate(url, ids, rank, adapter))

    return ask


def drafted_tokens(url: str) -> Ask:
    """Asks `url`, which drafts with a model, for greedy tokens, and how often it has verified drafts: the same drafts
    must have been accepted, for the tokens would be right without them."""

    def ask(ids: Sequence[int], rank: int | None) -> Answer:
        told = _generate(url, ids, rank, None)
        answer = answer_of(told)
        return replace(answer, said=(*answer.said, told["meta_info"]["spec_verify_ct"]))

    return ask


def tokens_of_a_grammar(url: str) -> Ask:
    """Asks `url` for greedy tokens of a grammar; an answer of anything else is no answer."""

    def ask(ids: Sequence[int], rank: int | None) -> Answer:
        told = _generate(url, ids, rank, None, {**GREEDY, "regex": GRAMMAR})
        if not re.fullmatch(GRAMMAR, told["text"]):
            raise ValueError(f"{told['text']!r} is none of {GRAMMAR}")
        return answer_of(told)

    return ask


def _generate(
    url: str, ids: Sequence[int], rank: int | None, adapter: str | None, sampling: Mapping[str, Any] = GREEDY
) -> dict[str, Any]:
    body = {
        "input_ids": list(ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "routed_dp_rank": rank,
        "lora_path": adapter,
    }
    return post(f"{url}/generate", body)


def vectors(url: str) -> Ask:
    """Asks `url` for the vector of a prompt, which must be equal bit for bit."""

    def ask(ids: Sequence[int], rank: int | None) -> Answer:
        told = post(f"{url}/encode", {"input_ids": list(ids), "routed_dp_rank": rank})
        return Answer(tuple(told["embedding"]), _sources(told["meta_info"]))

    return ask


def answer_of(told: dict[str, Any]) -> Answer:
    """SGLang's answer to a request for tokens, as it comes from /generate or from an Engine."""
    meta = told["meta_info"]
    return Answer(tuple(told["output_ids"]), _sources(meta), float(meta["output_token_logprobs"][0][0]))


def in_turn(ask: Ask, num_ranks: int, asked: Sequence[Sequence[int]]) -> list[Answer]:
    """All prompts at one rank each, then all again at the next one; a server of one rank is asked just so."""
    answers = []
    for shift in (0, 1):
        for number, ids in enumerate(asked):
            answers.append(ask(ids, (number + shift) % num_ranks if num_ranks > 1 else None))
    return answers


def together(ask: Ask, num_ranks: int, asked: Sequence[Sequence[int]]) -> list[Answer]:
    """The prompts in groups of one for each rank, all of a group at once."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda one: ask(one[1], one[0] % num_ranks), enumerate(asked)))


def tokens_from(answers: Sequence[Answer]) -> dict[str, int]:
    """Cached tokens of all answers by source."""
    return {source: sum(answer.cached.get(source, 0) for answer in answers) for source in SOURCES}


def differences(ours: Sequence[Answer], theirs: Sequence[Answer]) -> int:
    """Answers that are not the other server's."""
    return sum(one.said != other.said for one, other in zip(ours, theirs, strict=True))


def widest(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Largest difference between the log probabilities of first tokens."""
    return max(
        abs(one.first_log_probability - other.first_log_probability) for one, other in zip(ours, theirs, strict=True)
    )


def _sources(meta: dict[str, Any]) -> dict[str, int]:
    return {name: int(count) for name, count in (meta.get("cached_tokens_details") or {}).items() if name in SOURCES}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without the fields that are None."""
    said = {name: value for name, value in body.items() if value is not None}
    request = urllib.request.Request(url, json.dumps(said).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return dict(json.load(response))
