# SPDX-License-Identifier: Apache-2.0
"""The table "What clients may say" of docs/security.md, and values to try: of each row some that keep to its bound, and
some that do not. What the latter get, the table says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.modes import models

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
HEADING = "## What clients may say"


@dataclass(frozen=True)
class Said:
    """Fields of a request's body, and its headers."""

    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def hints(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    listed = [
        {"action_id": str(number), "action_type": kind, "action_version": "1", "payload": payload}
        for number, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": listed}


def _asked(*actions: tuple[str, dict[str, Any]]) -> Said:
    return Said({"kv_hints": hints(*actions)})


def _logprobs(**fields: Any) -> Said:
    return Said({"return_logprob": True, **fields})


def _sampled(**fields: Any) -> Said:
    return Said({"sampling_params": {"temperature": 1.0, "max_new_tokens": 3, **fields}})


FORGED = {
    **{"dp_max_kv_len": 2**63 - 1, "dp_max_kv_rank": 10**9, "policy": "x", "num_hot_ranks": 0},
    **{"reason": "nonsense", "dispatch_us": -(10**15)},
}
NOPE = ("banyan.policy", {"policy": "nope"})

NO_TOKENS = {"sampling_params": {"max_new_tokens": 0}}

TOLD = "`kv_hints`, `pin`, `retain`, `prefetch`, `demote`, `release`"

SAMPLING = (
    "`sampling_params`: `temperature`, `repetition_penalty`, `top_k`, `logit_bias`, `stop_token_ids`, "
    "`max_new_tokens`, `min_new_tokens`"
)

GOOD: dict[str, tuple[Said, ...]] = {
    "`kv_hints`, `banyan.policy`": (
        _asked(("banyan.policy", {"policy": "round_robin"})),
        _asked(("banyan.policy", {})),
    ),
    "`kv_hints`, `banyan.plan`": (_asked(("banyan.plan", {"action": "compute"})),),
    "`kv_hints`, other actions of `banyan.`": (_asked(("someone.else", {"key": "value"})),),
    TOLD: (
        _asked(("pin", {"ttl_s": 5}), ("retain", {}), ("release", {})),
        _asked(("prefetch", {"input_ids": list(range(64))}), ("demote", {"input_ids": list(range(64))})),
    ),
    "`cache_control` of Messages": (Said({"cache_control": {"type": "ephemeral", "ttl": "1h"}}),),
    "`/banyan/cache`": (),
    "`kv_hints` in all": (_asked(*(("someone.else", {}) for _ in range(64))),),
    "`input_ids`": (Said({"input_ids": [0, models.VOCABULARY - 1]}),),
    "`input_ids`, `text`": (Said({"input_ids": [5]}), Said({"input_ids": [[5], [6, 7]]})),
    "`top_logprobs_num`, `token_ids_logprob`, `logprob_start_len`": (
        _logprobs(top_logprobs_num=5, token_ids_logprob=[3], logprob_start_len=0),
    ),
    SAMPLING: (
        _sampled(temperature=1.5, top_k=40, repetition_penalty=1.1, logit_bias={"5": -100.0}),
        _sampled(top_k=-1, stop_token_ids=[7], min_new_tokens=1),
    ),
    "`sampling_params`: `n`": (_sampled(n=2),),
    "`sampling_params`: `stop_regex`": (_sampled(stop_regex="a+b"), _sampled(stop_regex=["x", "(ab|cd)+"])),
    "`positional_embed_overrides`, `return_hidden_states`, and any other field": (
        Said({"return_hidden_states": False, "no_logs": True, "positional_embed_overrides": None}),
    ),
    "`token_indices_to_pool`, `multi_item_delimiter_indices`": (),
    "`sampling_params`: `regex`, `ebnf`, `json_schema`, `structural_tag`": (_sampled(regex="a|b"),),
    "`sampling_params`: `is_normalized`, `stop_strs` and what else SGLang makes of the others": (),
    "`image_data`, `video_data`, `audio_data`": (),
    "`session_params`: `replace`": (),
    "`chat_template_kwargs`: `chat_template`": (),
    "`custom_labels`": (Said({"custom_labels": {}}),),
    "`lora_id`": (),
    "`rid`": (Said({"rid": "r"}), Said({"rid": "r"})),
    "`session_id`, `session_params.id`, `x-smg-routing-key`": (
        Said({"session_id": "s"}),
        Said(headers={"x-smg-routing-key": "k"}),
    ),
    "`prompt_cache_key`, `conversation`, `metadata`, `x-session-id` and [its kin](router.md#sessions)": (
        Said({"prompt_cache_key": "s", "metadata": {"user_id": "u"}}),
        Said(headers={"x-session-id": "k"}),
    ),
    "`banyan_path`, `banyan_request` of `/tokenize`": (),
    "`cache_salt`": (Said({"cache_salt": "tenant"}),),
    "`extra_key`": (Said({"extra_key": "tenant"}),),
    "`routed_dp_rank`": (Said({"routed_dp_rank": 0}),),
    "`priority`": (Said({"priority": 3}),),
    "`bootstrap_host`, `bootstrap_port`, `bootstrap_room`": (Said({"bootstrap_host": "2.2.2.2"}),),
    "`x-banyan-tenant`": (),
    "`x-banyan-read`, `x-banyan-source`, `x-banyan-plan`": (),
}

BAD: dict[str, tuple[Said, ...]] = {
    "`kv_hints`, `banyan.policy`": (
        _asked(NOPE),
        _asked(("banyan.prefix", FORGED), NOPE),
        _asked(("banyan.policy", {"policy": []}), ("banyan.prefix", FORGED)),
    ),
    "`kv_hints`, `banyan.plan`": (_asked(("banyan.plan", {"action": "steal"})),),
    "`kv_hints`, other actions of `banyan.`": (
        _asked(("banyan.prefix", FORGED)),
        _asked(("banyan.read", {"text": f"127.0.0.1:1 {2**62}"})),
        _asked(("banyan.source", {"text": ",".join(["127.0.0.1:1"] * 300)})),
    ),
    TOLD: (
        *(_asked(("pin", {"ttl_s": value})) for value in (0, -1, 1e9, "5", None)),
        *(_asked(("prefetch", {"input_ids": ids})) for ids in ([], [-1], [models.VOCABULARY], [2**70], "x", [[1]])),
        _asked(("pin", {"cache_salt": "of another"})),
        _asked(("pin", {"input_ids": [1] * 100_000})),
    ),
    "`cache_control` of Messages": (Said({"cache_control": ["ephemeral"]}),),
    "`/banyan/cache`": (),
    "`kv_hints` in all": (_asked(*(("someone.else", {}) for _ in range(65))),),
    "`input_ids`": (
        *(Said({"input_ids": ids}) for ids in ([1, 2**40], [2**31], [-1], [1, 2**63])),
        Said({"input_ids": [[1, 2], [models.VOCABULARY]]}),
    ),
    "`input_ids`, `text`": (
        Said({"input_ids": [[]]}),
        Said({"input_ids": [[], [5, 6]]}),
        Said({"input_ids": None, "text": ""}),
        Said({"input_ids": None, "text": ["", "a"]}),
        Said({"cache_salt": ["a", "b"]}),
        Said({"bootstrap_room": [1]}),
        Said({"sampling_params": [{}]}),
    ),
    "`top_logprobs_num`, `token_ids_logprob`, `logprob_start_len`": (
        _logprobs(top_logprobs_num=1000),
        _logprobs(token_ids_logprob=[2**31]),
        _logprobs(logprob_start_len=-5),
        _logprobs(token_ids_logprob=[1] * 20_000),
    ),
    SAMPLING: (
        *(_sampled(top_k=value) for value in (2**31, 2**63, 2**70)),
        *(_sampled(temperature=value) for value in (1e39, 1e308)),
        *(_sampled(repetition_penalty=value) for value in (1e-320, 1e-38)),
        *(_sampled(logit_bias={"5": value}) for value in (1e39, -1e39)),
        *(_sampled(stop_token_ids=ids, min_new_tokens=2) for ids in ([2**31], [-1], [models.VOCABULARY])),
        *(_sampled(max_new_tokens=value) for value in (2**31, 2**70)),
    ),
    "`sampling_params`: `n`": tuple(_sampled(n=value) for value in (4097, 2**31, 2**70)),
    "`sampling_params`: `stop_regex`": (
        _sampled(stop_regex="(a+)+b"),
        _sampled(stop_regex=".*.*.*x"),
        _sampled(stop_regex=["x", "(a|a|ab)*$"]),
        Said({"input_ids": [[5]] * 1100, **_sampled(stop_regex=["x" * 255 + "+"]).body}),
    ),
    "`positional_embed_overrides`, `return_hidden_states`, and any other field": (
        *(Said({"return_hidden_states": value}) for value in ("", 3, -1.5, [], {})),
        *(Said({"positional_embed_overrides": value}) for value in (0, "", [], [[1.0], [0]], {})),
        *(Said({"positional_embed_overrides": value}) for value in ([5, [0]], ["ab", [0]], [None, [0]])),
        *(Said({name: "x"}) for name in ("no_logs", "return_bytes", "require_reasoning", "disagg_prefill_dp_rank")),
    ),
    "`token_indices_to_pool`, `multi_item_delimiter_indices`": (
        *(Said({"token_indices_to_pool": places, **NO_TOKENS}) for places in ([10**6], [-(10**6)], [], [2**63])),
        Said({"multi_item_delimiter_indices": [10**6], **NO_TOKENS}),
    ),
    "`sampling_params`: `regex`, `ebnf`, `json_schema`, `structural_tag`": (_sampled(regex="a" * 300_000),),
    "`sampling_params`: `is_normalized`, `stop_strs` and what else SGLang makes of the others": (
        _sampled(is_normalized=True, stop_regex_strs=["(a+)+$"]),
    ),
    "`image_data`, `video_data`, `audio_data`": (Said({"image_data": {"format": "processor_output", "hash": 1}}),),
    "`session_params`: `replace`": (Said({"session_params": {"id": "s", "replace": True}}),),
    "`chat_template_kwargs`: `chat_template`": (),
    "`custom_labels`": (Said({"custom_labels": {"a": "b"}}), Said({"custom_labels": ["a"]})),
    "`lora_id`": (Said({"lora_id": []}), Said({"lora_id": "x"})),
    "`rid`": (Said({"rid": "r" * 1_000_000}), Said({"rid": "a#1"})),
    "`session_id`, `session_params.id`, `x-smg-routing-key`": (
        Said({"session_id": "s" * 1_000_000}),
        Said(headers={"x-smg-routing-key": "k" * 5000}),
    ),
    "`prompt_cache_key`, `conversation`, `metadata`, `x-session-id` and [its kin](router.md#sessions)": (
        Said({"prompt_cache_key": 5, "metadata": []}),
        Said({"conversation": {"id": ["c"]}, "metadata": {"user_id": "u" * 1_000_000}}),
        Said(headers={"x-session-id": "k" * 5000}),
    ),
    "`banyan_path`, `banyan_request` of `/tokenize`": (),
    "`cache_salt`": (Said({"cache_salt": "\ud800"}),),
    "`extra_key`": (Said({"extra_key": []}),),
    "`routed_dp_rank`": (Said({"routed_dp_rank": 99}),),
    "`priority`": (Said({"priority": 2**70}),),
    # At a server of no pair; ``test_pairs`` has one at each half.
    "`bootstrap_host`, `bootstrap_port`, `bootstrap_room`": (Said({"bootstrap_room": -1}),),
    "`x-banyan-tenant`": (Said(headers={"x-banyan-tenant": "0" * 64}),),
    "`x-banyan-read`, `x-banyan-source`, `x-banyan-plan`": (
        Said(headers={"x-banyan-read": "127.0.0.1:1"}),
        Said(headers={"x-banyan-source": "127.0.0.1:1 99999999999999999999 -1"}),
        Said(headers={"x-banyan-plan": "{" * 3000}),
    ),
}


def answers() -> dict[str, int]:
    """Of each row, the status that a bad value gets."""
    return {row: 400 if gets.startswith("400") else 200 for row, gets in _rows()}


def _rows() -> list[tuple[str, str]]:
    """``(field, what a bad value gets)`` of each row of the page's table."""
    table = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(row[0], row[2]) for row in cells]
