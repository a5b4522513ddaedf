# SPDX-License-Identifier: Apache-2.0
"""Requests as the ranks get them, for those that reach them past the main process."""

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from banyan.sglang_plugin.prompt_refusals import check_tokenized

VOCABULARY = 320


def request(ids=(1, 2), media=None, lora_id=None, **fields):
    """What SGLang's servicer sends: the names of sampling are those of SamplingParams."""
    logprobs = {name: fields.pop(name) for name in list(fields) if "logprob" in name}
    logprobs["multi_item_delimiter_indices"] = logprobs.pop("places_logprob", None)
    sampling = SamplingParams(**fields)
    sampling.normalize(tokenizer=SimpleNamespace(encode=lambda text, **_: [1]))
    return SimpleNamespace(
        input_ids=array("q", ids), mm_inputs=media, lora_id=lora_id, sampling_params=sampling, **logprobs
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "max_new_tokens": 0, "stop_token_ids": {0, VOCABULARY - 1}},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "logit_bias": {"3": -100.0}},
        {"stop_regex": ["a+b"], "top_logprobs_num": 5, "logprob_start_len": -1, "token_ids_logprob": [1]},
        {"ids": [VOCABULARY + 7], "media": object()},
        {"ids": [1] * 8000, "logprob_start_len": 0, "token_ids_logprob": [1] * 2000, "places_logprob": [0] * 500},
        {"ids": [1] * 4000, "top_logprobs_num": 20, "logprob_start_len": 0, "regex": "a+"},
    ],
)
def test_request_when_it_is_as_it_should_be_then_it_passes(fields):
    check_tokenized(request(**fields), VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ids": []}, "no tokens"),
        ({"lora_id": "x"}, "lora_id"),
        ({"ids": [1, VOCABULARY]}, "input_ids: 320"),
        ({"ids": [1, -1]}, "input_ids: -1"),
        ({"top_p": 2.0}, "top_p"),
        ({"min_p": -1.0}, "min_p"),
        ({"frequency_penalty": 1e9}, "frequency_penalty"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"temperature": 1e30}, "temperature"),
        ({"max_new_tokens": 2**31}, "max_new_tokens"),
        ({"logit_bias": {"3": 1e30}}, "logit_bias"),
        ({"logit_bias": {str(VOCABULARY): 1.0}}, "logit_bias"),
        ({"stop_token_ids": {VOCABULARY}}, "stop_token_ids"),
        ({"stop_regex": ["(a+)+b"]}, "stop_regex"),
        ({"top_logprobs_num": VOCABULARY + 1}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"token_ids_logprob": [VOCABULARY]}, "token_ids_logprob"),
        ({"token_ids_logprob": [1] * 20_000}, "20000 tokens at each place"),
        ({"ids": [1] * 4000, "token_ids_logprob": [1] * 1000, "logprob_start_len": 0}, "at 4000 places of the prompt"),
        ({"regex": "a" * 300_000}, "regex has 300000 characters"),
        ({"ids": [1, -1], "media": object()}, "input_ids: -1"),
        ({"ids": [1, 2**61], "media": object()}, "input_ids: 2305843009213693952"),
    ],
)
def test_request_when_it_would_end_the_rank_then_it_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        check_tokenized(request(**fields), VOCABULARY)
