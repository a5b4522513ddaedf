# SPDX-License-Identifier: Apache-2.0
"""What a client says is checked, and what only this server may say goes no further."""

import asyncio
import dataclasses
import math
import re
from contextlib import nullcontext
from http import HTTPStatus
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from banyan.planner import asked
from banyan.routing import POLICIES, hint
from banyan.sglang_plugin.launcher import clients

VOCABULARY = 320
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))


BY_HTTP = SimpleNamespace(scope={"path": "/generate"})


@pytest.fixture(autouse=True)
def _of_no_pair(monkeypatch):
    monkeypatch.setattr(clients.runtime, "disaggregation_mode", lambda: "null")


def action(kind, payload=None, number=0):
    return {"action_id": str(number), "action_type": kind, "action_version": "1", "payload": payload or {}}


def hints(*actions):
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)}


def admitted(**fields):
    obj = GenerateReqInput(**{"input_ids": [1, 2], "sampling_params": {}, **fields})
    clients.admit(obj, None, MANAGER)
    obj.normalize_batch_and_arguments()
    return obj


@pytest.mark.parametrize("kind", [*sorted(hint.OWN_ACTIONS), "banyan.anything"])
def test_hints_when_a_client_speaks_as_the_server_then_that_is_dropped_and_the_rest_stays(kind):
    theirs = action("somebody.else", {"a": 1}, 1)
    wish = action(hint.POLICY_ACTION, {"policy": "lmetric"}, 2)
    kept = admitted(kv_hints=hints(action(kind, {"reason": "nonsense"}), theirs, wish)).kv_hints
    assert [one.action_type for one in kept.actions] == ["somebody.else", hint.POLICY_ACTION]


def test_hints_when_each_prompt_of_a_batch_has_its_own_then_each_is_stripped():
    forged = hints(action(hint.ACTION_TYPE))
    kept = admitted(input_ids=[[1], [2]], kv_hints=[forged, None]).kv_hints
    assert [None if one is None else one.actions for one in kept] == [[], None]


@pytest.mark.parametrize(
    "payload",
    [
        {"policy": "nope"},
        {"policy": ["lmetric"]},
        {"policy": 7},
    ],
)
def test_wish_when_it_cannot_be_granted_then_the_request_is_refused(payload):
    with pytest.raises(clients.BadRequest, match="kv_hints: "):
        admitted(kv_hints=hints(action(hint.POLICY_ACTION, payload)))


def test_plan_when_it_is_no_plan_then_the_request_is_refused():
    with pytest.raises(clients.BadRequest, match="move or compute"):
        admitted(kv_hints=hints(action(asked.ACTION_TYPE, {"action": "steal"})))


def test_wish_when_it_is_one_then_it_goes_on():
    wishes = [action(hint.POLICY_ACTION, {"policy": name}) for name in POLICIES]
    wishes.append(action(asked.ACTION_TYPE, {"action": "move"}))
    assert len(admitted(kv_hints=hints(*wishes)).kv_hints.actions) == len(wishes)


def test_hints_when_there_are_too_many_then_the_request_is_refused():
    with pytest.raises(clients.BadRequest, match="65 actions"):
        admitted(kv_hints=hints(*[action("x")] * 65))


@pytest.mark.parametrize("broken", [{"actions": 1}, {"a": 1}, 7, "text", [7]])
def test_hints_when_they_are_no_envelope_then_sglang_refuses_them(broken):
    with pytest.raises(ValueError):
        admitted(kv_hints=broken)


@pytest.mark.parametrize("ids", [0, 7, 0.5, True, "", "x", {}, {"a": 1}])
@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_ids_when_they_are_no_list_then_the_request_is_refused(ids, kind):
    with pytest.raises(clients.BadRequest, match="no list of tokens"):
        clients.admit(kind(input_ids=ids, sampling_params={}), None, MANAGER)


WITH_IMAGES = SimpleNamespace(**vars(MANAGER), mm_processor=object())


@pytest.mark.parametrize("ids", [[1, 2**40], [2**31], [-1], [VOCABULARY], [10**30]])
@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
@pytest.mark.parametrize(
    ("manager", "media"),
    [
        (MANAGER, {}),
        (MANAGER, {"image_data": "a picture"}),
        (WITH_IMAGES, {}),
        (WITH_IMAGES, {"image_data": []}),
        (WITH_IMAGES, {"video_data": []}),
        (WITH_IMAGES, {"audio_data": [None]}),
    ],
    ids=["text", "picture for a model of text", "images", "no picture", "no video", "no sound"],
)
def test_ids_when_the_model_does_not_have_one_and_makes_them_of_nothing_then_refused(
    ids, kind, manager, media, monkeypatch
):
    monkeypatch.setattr(clients.runtime, "config", object)
    with pytest.raises(clients.BadRequest, match="none of the model's 320 tokens"):
        clients.before_validate_one_request(manager, kind(input_ids=ids, sampling_params={}, **media), ids)


def test_ids_when_they_stand_for_an_image_then_they_may_be_beyond_the_vocabulary(monkeypatch):
    monkeypatch.setattr(clients.runtime, "config", object)
    obj = GenerateReqInput(input_ids=[1, VOCABULARY], image_data="a picture", sampling_params={})
    clients.before_validate_one_request(WITH_IMAGES, obj, obj.input_ids)


@pytest.mark.parametrize("ids", [[-1, 5], [2**61], [2**31], [5, -(2**63)]])
def test_ids_when_they_stand_beside_an_image_then_they_are_below_what_images_become_and_none_is_negative(
    ids, monkeypatch
):
    """A negative one ends the rank where it is hashed; an image's own number would be taken for the image."""
    monkeypatch.setattr(clients.runtime, "config", object)
    sent = GenerateReqInput(input_ids=ids, image_data="a picture", sampling_params={})
    with pytest.raises(clients.BadRequest, match="is none of"):
        clients.admit(sent, BY_HTTP, WITH_IMAGES)
    made = GenerateReqInput(text="a", image_data="a picture", sampling_params={})
    with pytest.raises(clients.BadRequest, match="is none of"):
        clients.before_validate_one_request(WITH_IMAGES, made, ids)


@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_prompt_when_it_has_no_tokens_then_the_request_is_refused(kind, monkeypatch):
    monkeypatch.setattr(clients.runtime, "config", object)
    with pytest.raises(clients.BadRequest, match="no tokens"):
        clients.before_validate_one_request(MANAGER, kind(text="", sampling_params={}), [])
    clients.before_validate_one_request(MANAGER, kind(text="a", sampling_params={}), [5])


def test_fields_when_sglang_takes_a_list_of_them_then_one_prompt_may_not_have_one(monkeypatch):
    monkeypatch.setattr(clients.runtime, "config", object)
    kinds = {one.name: str(one.type) for one in dataclasses.fields(GenerateReqInput)}
    listed = {name for name, kind in kinds.items() if re.search(r"Union\[List\[(Optional\[)?(str|int|bool|Dict)", kind)}
    others = {
        "text",
        "mm_hashes",
        "mm_content_hashes",
        "multi_item_delimiter_indices",
        "token_indices_to_pool",
        "token_ids_logprob",
    }
    assert listed - others <= set(clients.ONE_FOR_A_PROMPT)
    for field in clients.ONE_FOR_A_PROMPT:
        with pytest.raises(clients.BadRequest, match=f"{field}: a list"):
            clients.before_validate_one_request(MANAGER, SimpleNamespace(**{field: []}), [5])


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("top_logprobs_num", [-1, VOCABULARY + 1, 2**31], [0, VOCABULARY]),
        ("token_ids_logprob", [[VOCABULARY], [1, -1]], [[0, VOCABULARY - 1], []]),
        ("logprob_start_len", [-2, -(2**31)], [-1, 0, 7]),
    ],
)
def test_logprobs_when_the_model_does_not_have_as_many_tokens_then_the_request_is_refused(
    field, bad, good, monkeypatch
):
    monkeypatch.setattr(clients.runtime, "config", object)
    for value in bad:
        with pytest.raises(clients.BadRequest, match=field):
            clients.before_validate_one_request(MANAGER, SimpleNamespace(**{field: value}), [5])
    for value in good:
        clients.before_validate_one_request(MANAGER, SimpleNamespace(**{field: value}), [5])


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", [1e39, math.inf, math.nan], [0, 0.7, 2.0]),
        ("repetition_penalty", [1e-38, 1e-320, 0.0], [1e-3, 1.0, 2.0]),
        ("top_k", [2**31, 2**70], [-1, 1, 50]),
        ("logit_bias", [{"5": 1e39}, {"5": -math.inf}], [{}, None, {"5": -100.0, "6": 100}]),
        ("stop_token_ids", [[VOCABULARY], [-1]], [None, [], [5]]),
        (
            "stop_regex",
            ["(a+)+b", ["x", "(a+)+b"], "(", ["x"] * 33, "x" * 257],
            [None, 5, True, {"a": 1}, [5, None], "a+"],
        ),
        ("max_new_tokens", [2**31, -1], [None, 0, 100_000]),
        ("min_new_tokens", [2**40], [0, 5]),
    ],
)
def test_sampling_when_32_bits_cannot_reckon_with_it_then_the_request_is_refused(field, bad, good, monkeypatch):
    monkeypatch.setattr(clients.runtime, "config", object)

    def asked(value):
        return SimpleNamespace(sampling_params={"temperature": 1.0, field: value})

    for value in bad:
        with pytest.raises(clients.BadRequest, match=field):
            clients.before_validate_one_request(MANAGER, asked(value), [5])
    for value in good:
        clients.before_validate_one_request(MANAGER, asked(value), [5])


@pytest.mark.parametrize("params", [{"n": 4097}, {"n": 2**70}, [{"n": 1}, {"n": 1e9}]])
def test_samples_when_more_are_asked_for_than_a_server_makes_at_once_then_the_request_is_refused(params):
    with pytest.raises(clients.BadRequest, match="n is"):
        admitted(sampling_params=params)
    admitted(sampling_params={"n": 3})


@pytest.mark.parametrize("prompts", [{"text": ["a"] * 17}, {"input_ids": [[1]] * 17}, {"input_embeds": [[[0.1]]] * 17}])
def test_samples_when_they_are_few_of_each_of_many_prompts_then_all_are_counted(prompts):
    asked = {"input_ids": None, **prompts}
    with pytest.raises(clients.BadRequest, match="n is 4096, for 17 prompts"):
        admitted(**asked, sampling_params={"n": 4096})
    with pytest.raises(clients.BadRequest, match="for 17 prompts"):
        admitted(**asked, sampling_params=[{"n": 4096}] * 17)
    admitted(**asked, sampling_params={"n": 3})
    admitted(input_ids=[1] * 17, sampling_params={"n": 4096})
    admitted(input_ids=None, input_embeds=[[0.1]] * 17, sampling_params={"n": 4096})


def test_patterns_when_they_are_few_of_each_of_many_prompts_then_all_are_counted():
    """Looking at them, and SGLang's own look, would keep all others waiting for minutes."""
    patterns = [f"{number:02}" + "x" * 253 + "+" for number in range(32)]
    others = [{"stop_regex": [f"{number:03}{pattern[3:]}" for pattern in patterns]} for number in range(300)]
    for params in ({"stop_regex": patterns}, others):
        with pytest.raises(clients.BadRequest, match="stop_regex: 2457600 characters of all prompts, 262144 at most"):
            admitted(input_ids=[[1]] * 300, sampling_params=params)
    admitted(input_ids=[[1]] * 8, sampling_params={"stop_regex": patterns})
    admitted(input_ids=[1] * 300, sampling_params={"stop_regex": patterns})
    admitted(input_ids=[[1]] * 300, sampling_params=[{"stop_regex": "a+"}, {}, {"stop_regex": ["b", "c"]}] * 100)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("params", [{"n": 2}, [{"n": 1}, {"n": 3}]])
def test_samples_when_a_pair_is_asked_for_several_of_a_prompt_then_the_request_is_refused(params, mode, monkeypatch):
    monkeypatch.setattr(clients.runtime, "disaggregation_mode", lambda: mode)
    with pytest.raises(clients.BadRequest, match="a pair of servers makes one sample"):
        admitted(sampling_params=params)


def test_batch_when_it_comes_to_a_pair_then_each_of_its_prompts_has_a_room(monkeypatch):
    monkeypatch.setattr(clients.runtime, "disaggregation_mode", lambda: "prefill")
    asked = admitted(input_ids=[[1], [2], [3]], sampling_params={"n": 1}, bootstrap_room=7)
    assert [asked[number].bootstrap_room for number in range(3)] == [7, 8, 9]


@pytest.mark.parametrize(
    ("mode", "host", "taken"),
    [("prefill", "10.0.0.1", [(7, "a")]), ("decode", None, [(7, "a")]), ("decode", "2.2.2.2", []), ("null", None, [])],
)
def test_room_when_a_request_comes_to_a_pair_then_it_is_taken_but_for_those_that_meet_nobody(
    monkeypatch, mode, host, taken
):
    monkeypatch.setattr(clients.runtime, "disaggregation_mode", lambda: mode)
    monkeypatch.setattr(clients.runtime, "config", object)
    said = []
    monkeypatch.setattr(clients.taken_ids, "take", lambda rid, manager: None)
    monkeypatch.setattr(clients.taken_ids, "take_room", lambda room, rid: said.append((room, rid)))
    obj = SimpleNamespace(rid="a", bootstrap_host=host, bootstrap_room=7)
    clients.before_validate_one_request(MANAGER, obj, [5])
    assert said == taken


@pytest.mark.parametrize("lora_id", ["x", [], ["x"]])
def test_adapter_when_a_client_names_it_by_its_id_then_the_request_is_refused(lora_id):
    with pytest.raises(clients.BadRequest, match="lora_path"):
        admitted(lora_id=lora_id)


def test_prompt_when_it_is_one_id_of_anothers_then_the_request_is_refused(monkeypatch):
    monkeypatch.setattr(clients.runtime, "config", object)
    with pytest.raises(clients.BadRequest, match="no list of tokens"):
        clients.before_validate_one_request(MANAGER, GenerateReqInput(text="a", input_ids=5), 5)


def test_prompt_when_vectors_or_a_session_stand_for_its_tokens_then_it_goes_on(monkeypatch):
    monkeypatch.setattr(clients.runtime, "config", object)
    clients.before_validate_one_request(MANAGER, GenerateReqInput(input_embeds=[[0.0]]), None)
    clients.before_validate_one_request(MANAGER, GenerateReqInput(input_ids=[], session_params={"id": "s"}), [])
    with pytest.raises(clients.BadRequest):
        clients.before_validate_one_request(MANAGER, GenerateReqInput(input_ids=[], session_params={}), [])


def test_id_when_it_is_empty_then_sglang_makes_one_and_in_a_batch_it_is_refused():
    assert admitted(rid="").rid and admitted(rid="r").rid == "r"
    with pytest.raises(clients.BadRequest, match="rid: an empty one"):
        admitted(input_ids=[[1], [2]], rid=["r", ""])


def test_id_when_it_is_under_way_at_another_worker_then_the_request_is_refused(monkeypatch, tmp_path):
    (tmp_path / "of all workers").touch()
    monkeypatch.setattr(clients.taken_ids, "_path", lambda: str(tmp_path / "of all workers"))
    for question, answer in (("config", object()), ("is_front", True), ("is_sharing", True)):
        monkeypatch.setattr(clients.runtime, question, lambda answer=answer: answer)

    async def come_to_a_worker():
        monkeypatch.setattr(clients.taken_ids, "_taken", type(clients.taken_ids._taken)())
        monkeypatch.setattr(clients.taken_ids, "_is_looking", False)
        clients.taken_ids._file.cache_clear()
        clients.before_validate_one_request(MANAGER, GenerateReqInput(text="a", rid="r", sampling_params={}), [5])

    asyncio.run(come_to_a_worker())
    with pytest.raises(clients.BadRequest, match="use another id"):
        asyncio.run(come_to_a_worker())


@pytest.mark.parametrize("rid", [None, "r", ["r", "s"]])
def test_stream_when_its_request_is_refused_then_sglang_can_end_it(rid, monkeypatch):
    obj = GenerateReqInput(input_ids=[1], lora_id="x", sampling_params={}, stream=True, rid=rid)
    with pytest.raises(clients.BadRequest):
        clients.admit(obj, None, MANAGER)

    async def at_once(delay_s):
        pass

    monkeypatch.setattr(asyncio, "sleep", at_once)
    asyncio.run(TokenizerManager.create_abort_task(SimpleNamespace(rid_to_state={}), obj)())


def test_refusal_when_raised_then_sglang_answers_400():
    # Its entry points make 400 of every ValueError of a request.
    assert issubclass(clients.BadRequest, ValueError) and HTTPStatus.BAD_REQUEST == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KINDS = st.sampled_from([*sorted(hint.OWN_ACTIONS), hint.POLICY_ACTION, asked.ACTION_TYPE, "banyan.", "other"])
ACTIONS = st.builds(
    lambda kind, payload: action(kind, payload),
    KINDS,
    st.dictionaries(st.sampled_from(["policy", "action", "reason"]), JSON, max_size=3),
)


@given(st.lists(ACTIONS, max_size=4), st.one_of(st.none(), st.lists(JSON, max_size=4)))
def test_request_when_it_is_drawn_then_it_is_refused_or_says_nothing_of_the_servers(actions, ids):
    obj = GenerateReqInput(text="hi" if ids is None else None, input_ids=ids, kv_hints=hints(*actions))
    try:
        clients.admit(obj, None, MANAGER)
    except clients.BadRequest:
        return
    allowed = {hint.POLICY_ACTION, asked.ACTION_TYPE, "other"}
    assert {one.action_type for one in obj.kv_hints.actions} <= allowed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rid": "HEALTH_CHECK_1"}, "rid: HEALTH_CHECK"),
        ({"rid": ["a", "HEALTH_CHECK"], "input_ids": [[1], [2]], "sampling_params": [{}, {}]}, "rid: HEALTH_CHECK"),
        ({"image_data": {"format": "processor_output", "pixel_values": [[0.1]]}}, "image_data: "),
        ({"video_data": ["a video", {"hash": 1, "pad_value": 5}]}, "video_data: "),
        ({"audio_data": [[{"feature": [0.5]}]]}, "audio_data: "),
    ],
)
def test_request_when_a_client_says_what_is_not_its_to_say_then_it_is_refused_by_name(fields, said):
    obj = GenerateReqInput(**{"input_ids": [1, 2], "sampling_params": {}, **fields})
    with pytest.raises(clients.BadRequest, match=f"^{said}"):
        clients.admit(obj, BY_HTTP, MANAGER)


def test_request_when_the_server_asks_itself_or_a_program_in_it_then_it_may_say_more():
    for scope in ({"path": "/health_generate"}, {"path": "/api/health", "root_path": "/api"}):
        check = GenerateReqInput(rid="HEALTH_CHECK_1", input_ids=[1], sampling_params={})
        clients.admit(check, SimpleNamespace(scope=scope), MANAGER)
    clients.admit(GenerateReqInput(input_ids=[1], image_data={"format": "x"}, sampling_params={}), None, MANAGER)


@pytest.mark.parametrize(("said", "taken"), [("x", None), (10**400, None), (math.nan, None), (5, None), (1.5, 1.5)])
def test_time_when_a_client_says_when_it_came_then_nothing_is_reckoned_with_what_is_none(said, taken):
    assert admitted(received_time=said).received_time == taken


@pytest.mark.parametrize(("salt", "kept"), [(None, ["ab"]), ("tenant", None)])
def test_image_when_a_client_with_a_salt_names_its_hash_then_it_is_not_believed(salt, kept):
    assert admitted(image_data="a picture", mm_hashes=["ab"], cache_salt=salt).mm_hashes == kept


@pytest.mark.parametrize(
    ("mode", "num_top", "is_served"),
    [("null", 129, True), ("prefill", 129, False), ("decode", 128, True)],
)
def test_logprobs_when_a_pair_has_no_room_for_them_then_refused(monkeypatch, mode, num_top, is_served):
    monkeypatch.setattr(clients.runtime, "config", object)
    monkeypatch.setattr(clients.runtime, "disaggregation_mode", lambda: mode)
    obj = GenerateReqInput(input_ids=[1], return_logprob=True, top_logprobs_num=num_top, sampling_params={})
    with nullcontext() if is_served else pytest.raises(clients.BadRequest, match="129 tokens at each place, 128"):
        clients.before_validate_one_request(MANAGER, obj, obj.input_ids)
