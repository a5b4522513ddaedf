# SPDX-License-Identifier: Apache-2.0
"""What another process of the server could not read."""

import pytest
from test.sglang_plugin.dispatcher.dispatch_rig import request

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.wire_types import after_create_tokenized_object
from banyan.sglang_plugin.prompt_refusals import BadRequest

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
    after_create_tokenized_object(message)
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
        after_create_tokenized_object(request(range(3), **{**VALID, field: value}))


def test_message_when_what_it_holds_cannot_be_made_then_it_is_refused():
    with pytest.raises(BadRequest, match="another type"):
        after_create_tokenized_object(request(range(3), **VALID, positional_embed_overrides=[[1.0], [0]]))


def test_message_when_banyan_is_off_then_it_is_nobodys(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    after_create_tokenized_object(request(range(3), **{**VALID, "priority": "x"}))
