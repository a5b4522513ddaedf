# SPDX-License-Identifier: Apache-2.0
"""What another process of the server could not read."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from test.sglang_plugin.dispatcher.dispatch_rig import request

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.wire_types import after_create_tokenized_object
from banyan.sglang_plugin.prompt_refusals import BadRequest

MANAGER = SimpleNamespace(model_config=SimpleNamespace(hidden_size=4))
VALID = {
    "stream": False,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
}


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setattr(runtime, "config", object)


def test_message_when_all_its_fields_have_their_types_then_it_goes_on_as_it_is():
    message = request(range(100), **VALID, priority=3, return_hidden_states="last")
    after_create_tokenized_object(message, MANAGER)
    assert list(message.input_ids) == list(range(100)) and message.priority == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positional_embed_overrides", 0),
        ("return_hidden_states", 3),
        ("priority", "x"),
        ("no_logs", "x"),
        ("routing_key", ["k"]),
        ("custom_logit_processor", [1]),
        ("stream", 2),
    ],
)
def test_message_when_a_field_has_another_type_then_it_is_refused_by_name(field, value):
    with pytest.raises(BadRequest, match=f"^{field}: "):
        after_create_tokenized_object(request(range(3), **{**VALID, field: value}), MANAGER)


def test_message_when_what_it_holds_cannot_be_made_then_it_is_refused():
    with pytest.raises(BadRequest, match="a vector for each place"):
        after_create_tokenized_object(request(range(3), **VALID, positional_embed_overrides=[[1.0], [0]]), MANAGER)


@pytest.mark.parametrize("name", ["token_indices_to_pool", "multi_item_delimiter_indices"])
@pytest.mark.parametrize("places", [[], [3], [-1], [0, 2**63], "x", [0.5], [[0]]])
def test_places_when_the_prompt_does_not_have_them_then_refused(name, places):
    with pytest.raises(BadRequest, match=f"^{name}: "):
        after_create_tokenized_object(request(range(3), **{**VALID, name: places}), MANAGER)
    after_create_tokenized_object(request(range(3), **{**VALID, name: [0, 2]}), MANAGER)


@pytest.mark.parametrize(
    ("vectors", "is_good"),
    [
        (PositionalEmbeds(5, [0]), False),
        (PositionalEmbeds("ab", [0]), False),
        (PositionalEmbeds(None, [0]), False),
        (PositionalEmbeds(torch.zeros(1, 2), [0]), False),
        (PositionalEmbeds(torch.zeros(1, 4), [3]), False),
        (PositionalEmbeds(torch.zeros(2, 4), [0, 2]), True),
    ],
)
def test_vectors_when_they_are_not_the_models_or_stand_nowhere_then_refused(vectors, is_good):
    with nullcontext() if is_good else pytest.raises(BadRequest, match=r"^positional_embed_overrides: "):
        after_create_tokenized_object(request(range(3), **VALID, positional_embed_overrides=vectors), MANAGER)


@pytest.mark.parametrize("text", [5, [5], {"a": "b"}])
def test_text_when_it_is_none_then_refused(text):
    with pytest.raises(BadRequest, match=r"^text: "):
        after_create_tokenized_object(request(range(3), **{**VALID, "input_text": text}), MANAGER)


def test_message_when_banyan_is_off_then_it_is_nobodys(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    after_create_tokenized_object(request(range(3), **{**VALID, "priority": "x"}), MANAGER)
