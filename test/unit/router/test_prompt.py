# SPDX-License-Identifier: Apache-2.0
"""What is read of a body, and that nothing odd stops a request."""

from __future__ import annotations

import itertools
import json

import pytest

from banyan.router.asked_prompt import Asked
from banyan.router.chats import MEDIUM_BYTES
from banyan.router.paths import CHAT_COMPLETIONS, COMPLETIONS, GENERATE, MESSAGES
from banyan.router.prompt import Request, pin, read, renamed
from banyan.routing.sent import PIECE_BYTES, piece_ids


def ask(path, headers=None, **fields):
    return read(path, json.dumps(fields).encode(), headers or {})


@pytest.mark.parametrize(
    ("path", "fields", "num_others"),
    [
        (GENERATE, {"input_ids": [1, 2, 3]}, 0),
        (GENERATE, {"input_ids": [[1, 2, 3], [4]], "text": None}, 1),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 0),
        (COMPLETIONS, {"prompt": [[1, 2, 3], [4], [5]]}, 2),
    ],
)
def test_tokens_when_given_then_those_of_the_first_prompt(path, fields, num_others):
    asked = ask(path, **fields)
    assert list(asked.token_ids) == [1, 2, 3] and asked.num_others == num_others


def test_batch_when_its_prompts_differ_in_length_then_each_counts_for_itself():
    long = Asked(ask(COMPLETIONS, prompt=["x" * 4000, *[""] * 5000]))
    assert long.num_tokens == 1000 + 5000 and long.request.num_others == 5000
    tokens = ask(GENERATE, input_ids=[[1], [2] * 300, [3] * 200])
    assert Asked(tokens, tokens.token_ids).num_tokens == 501
    seen = ask(GENERATE, text=["what", "x" * 4000], image_data="y")
    assert Asked(seen).num_tokens == (MEDIUM_BYTES + 4) // 4 + 1000


@pytest.mark.parametrize(("path", "fields"), [(GENERATE, {"text": "héllo"}), (COMPLETIONS, {"prompt": ["héllo"]})])
def test_text_when_given_then_it_is_tokenised_alone(path, fields):
    asked = ask(path, **fields)
    assert asked.text == "héllo".encode() and asked.tokenize == {"prompt": "héllo"}


def test_chat_when_it_grows_then_its_text_grows_at_the_end():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    short, long = (ask(CHAT_COMPLETIONS, messages=messages[:num], stream=True, temperature=0) for num in (1, 2))
    assert long.text.startswith(short.text)
    assert "stream" not in long.tokenize and long.tokenize["messages"] == messages


def test_chat_when_its_client_writes_a_question_into_it_then_the_router_does_not_ask_that_in_its_own_name():
    other = {"previous_response_id": "resp_of_somebody", "input": "x"}
    messages = [{"role": "user", "content": "hi"}]
    asked = ask(CHAT_COMPLETIONS, messages=messages, banyan_path="/v1/responses", banyan_request=other)
    assert asked.tokenize == {"messages": messages}


def test_chat_when_tools_differ_then_its_text_does_from_the_start():
    messages = [{"role": "user", "content": "a"}]
    with_tools = ask(CHAT_COMPLETIONS, messages=messages, tools=[{"type": "function"}])
    assert not with_tools.text.startswith(ask(CHAT_COMPLETIONS, messages=messages).text)


def test_images_when_sent_then_tokens_would_not_tell():
    parts = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    assert ask(CHAT_COMPLETIONS, messages=[{"role": "user", "content": parts}]).tokenize is None
    assert ask(CHAT_COMPLETIONS, messages=[{"role": "user", "content": parts[:1]}]).tokenize is not None
    assert ask(GENERATE, input_ids=[1, 2], image_data="x").token_ids is None
    assert ask(GENERATE, text="what", image_data="x").tokenize is None
    assert ask(GENERATE, text="what", input_embeds=[[0.5]]).row() is None


def about(path, image, words="what is it? " * 100):
    """A prompt of much text and an image."""
    if path == GENERATE:
        return ask(GENERATE, text=words, image_data=image)
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": words}]
    system = {"role": "system", "content": "be brief. " * 60}
    return ask(CHAT_COMPLETIONS, messages=[system, {"role": "user", "content": parts}])


def pieces_in_common(one, other):
    both = zip(piece_ids(one.row()), piece_ids(other.row()), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


@pytest.mark.parametrize(("path", "num_in_front"), [(GENERATE, 0), (CHAT_COMPLETIONS, 600 // PIECE_BYTES)])
def test_images_when_they_differ_then_equal_words_behind_them_are_not_taken_for_a_prefix(path, num_in_front):
    one, again, other = (about(path, image) for image in ("data:a", "data:a", "data:b"))
    assert one.row() == again.row()
    assert pieces_in_common(one, other) == num_in_front
    assert pieces_in_common(one, about(path, "data:a", "who is it? " * 100)) >= MEDIUM_BYTES // PIECE_BYTES


@pytest.mark.parametrize("path", [GENERATE, CHAT_COMPLETIONS])
def test_images_when_they_are_large_then_they_do_not_count_for_more_than_small_ones(path):
    small, large = (about(path, "data:" + "a" * size) for size in (10, 1_000_000))
    assert len(small.row()) == len(large.row())
    assert about(GENERATE, None).row() == ask(GENERATE, text="what is it? " * 100).row()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"prompt": 5, "input_ids": {}, "messages": "x"}'])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT_COMPLETIONS])
def test_body_when_it_says_nothing_then_it_is_the_servers_to_refuse(path, body):
    asked = read(path, body, {})
    assert (asked.token_ids, asked.text, asked.session) == (None, None, None)


def test_namespace_when_a_lora_or_an_extra_key_is_named_then_events_do_not_tell():
    assert ask(GENERATE, text="x", cache_salt="s").is_salted_only
    assert Request().is_salted_only
    assert not ask(GENERATE, text="x", cache_salt="s", extra_key="k").is_salted_only
    assert not ask(GENERATE, text="x", lora_path="adapter").is_salted_only


@pytest.mark.parametrize(
    ("path", "model", "names_adapter"),
    [
        (CHAT_COMPLETIONS, "m", False),
        (CHAT_COMPLETIONS, "s3://m", False),
        (CHAT_COMPLETIONS, "m:adapter", True),
        (CHAT_COMPLETIONS, "s3://m:adapter", True),
        (MESSAGES, "m:adapter", True),
        (COMPLETIONS, "m:adapter", True),
        (GENERATE, "m:adapter", False),
        ("/api/chat", "m:8b", False),
    ],
)
def test_namespace_when_the_model_names_an_adapter_then_events_do_not_tell(path, model, names_adapter):
    said = {"model": model, "messages": [{"role": "user", "content": "x"}], "prompt": "x", "text": "x"}
    asked = read(path, json.dumps(said).encode(), {}, models={"m", "s3://m"})
    assert asked.text is not None and asked.is_salted_only is not names_adapter
    assert model in asked.namespace or not names_adapter


def test_session_when_named_then_as_the_engine_does():
    header = {"x-smg-routing-key": "key"}
    assert ask(GENERATE, header, text="x").session == "key"
    assert ask(GENERATE, header, text="x", session_params={"id": "s"}).session == "s"
    assert ask(GENERATE, text="x").session is None


def test_rank_when_the_client_names_one_then_it_stays():
    assert not ask(GENERATE, text="x", routed_dp_rank=0).may_pin
    assert not ask(COMPLETIONS, prompt="x", data_parallel_rank=1).may_pin
    assert not ask(GENERATE, {"x-override-routed-dp-rank": "1"}, text="x").may_pin
    assert not ask(COMPLETIONS, {"x-data-parallel-rank": "1"}, prompt="x").may_pin
    assert not read(GENERATE, b"{}", {}).may_pin and not read(GENERATE, b"[{}]", {}).may_pin


def test_pin_when_added_then_everything_else_is_as_it_was():
    body = b' { "text" : "{caf\\u00e9}", "x":1.50}'
    assert read(GENERATE, body, {}).may_pin
    pinned = pin(body, 3)
    assert json.loads(pinned) == json.loads(body) | {"routed_dp_rank": 3}
    assert pinned.startswith(body[:-1])


@pytest.mark.parametrize(("path", "name"), [(GENERATE, "rid"), ("/v1/responses", "request_id")])
def test_id_when_it_is_made_another_then_it_neither_begins_as_the_clients_nor_comes_again(path, name):
    body = b' { "text" : "x", "%b": "resp" } ' % name.encode()
    made = [json.loads(renamed(body, path)) for _ in range(2)]
    assert len({fields[name] for fields in made}) == 2 and all(fields["text"] == "x" for fields in made)
    assert name != "rid" or not any(fields[name].startswith("r") for fields in made)


@pytest.mark.parametrize(
    "body", [b'{"text": "\\"rid\\": 5"}', b'--x; name="rid"\r\n{"a": 1}', b'{"rid"', b"", b'["rid"]']
)
def test_id_when_the_client_has_given_none_or_the_body_is_no_object_then_it_stays_as_it_is(body):
    assert renamed(body, GENERATE) == body


def test_pin_when_the_client_has_sent_a_null_in_its_place_then_the_rank_counts():
    body = b'{"routed_dp_rank": null, "text": "x"}'
    assert read(GENERATE, body, {}).may_pin and json.loads(pin(body, 3))["routed_dp_rank"] == 3
