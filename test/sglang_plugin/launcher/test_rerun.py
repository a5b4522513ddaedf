# SPDX-License-Identifier: Apache-2.0
"""A request that met damaged pages is run again, marked; any other end is passed on."""

import asyncio
import json
from contextlib import nullcontext
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import HTTPException, Request
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

from banyan import faults
from banyan.config import Config
from banyan.features.pairs.roles import Role
from banyan.planner import asked
from banyan.routing.conversation import conversation_of
from banyan.routing.headers import PLAN_HEADER, READ_HEADER, SOURCE_HEADER
from banyan.routing.hint import NOBODY, READ_ACTION, SESSION_ACTION, SOURCE_ACTION, TEXT
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.kv_hints import payload_of
from banyan.sglang_plugin.launcher import rerun, taken_ids

DAMAGED = HTTPException(status_code=HTTPStatus.SERVICE_UNAVAILABLE, detail=rerun.LOAD_FAILED)
ABORT = {"meta_info": {"finish_reason": {"type": "abort", "message": rerun.LOAD_FAILED, "status_code": 503}}}


MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=320), rid_to_state={}, gracefully_exit=False)


class Engine:
    """Answers run after run from a list: what to yield or to raise."""

    def __init__(self, *runs):
        self.runs = list(runs)
        self.seen = []
        self.under_way = []

    def generate(self, manager, obj, request):
        obj.normalize_batch_and_arguments()
        self.seen.append(obj.kv_hints)
        self.under_way.append(rerun.UNDER_WAY.get())
        return self._answers()

    def embed(self, manager, obj, request):
        return self._answers()

    async def _answers(self):
        for step in self.runs.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "config", lambda: Config())
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "null")


def ask(engine, request=None, manager=MANAGER, **fields):
    async def collect():
        obj = GenerateReqInput(**{"input_ids": [1, 2, 3], "sampling_params": {}, **fields})
        return [answer async for answer in rerun.around_generate_request(engine.generate, manager, obj, request)]

    return asyncio.run(collect())


def actions(hints):
    return [action.action_type for action in hints.actions]


def test_answer_when_pages_were_damaged_then_the_second_runs_and_it_computes():
    engine = Engine([DAMAGED], ["right"])
    assert ask(engine) == ["right"]
    assert engine.seen[0] is None and actions(engine.seen[1]) == [asked.ACTION_TYPE]


def test_run_when_another_was_before_it_in_the_same_task_then_it_is_told_from_that_one():
    engine = Engine(["right"], [DAMAGED], ["right"])

    async def one_by_one():
        for _ in range(2):
            obj = GenerateReqInput(input_ids=[1, 2, 3], sampling_params={})
            async for _answer in rerun.around_generate_request(engine.generate, MANAGER, obj):
                pass

    asyncio.run(one_by_one())
    assert len(set(engine.under_way)) == 3 and None not in engine.under_way


def test_damage_when_the_rid_is_long_and_has_lines_then_the_log_has_one_of_bounded_length(caplog):
    ask(Engine([DAMAGED], ["right"]), rid="r\n" * 9999)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "banyan"]
    assert "\n" not in line and len(line) < 300


def test_stream_when_it_ends_before_its_first_token_then_the_second_runs():
    engine = Engine([ABORT], ["right", "more"])
    assert ask(engine, stream=True) == ["right", "more"]


def test_vector_when_pages_were_damaged_then_it_is_asked_for_once_more():
    engine = Engine([DAMAGED], ["right"])

    async def collect():
        obj = EmbeddingReqInput(input_ids=[1, 2, 3])
        return [answer async for answer in rerun.around_generate_request(engine.embed, MANAGER, obj)]

    assert asyncio.run(collect()) == ["right"] and engine.runs == []


def test_hints_when_the_client_sent_some_then_they_are_kept():
    theirs = KvHintAction(action_id="a", action_type="theirs", action_version="1")
    engine = Engine([DAMAGED], ["right"])
    ask(engine, kv_hints=KvHintsEnvelope(protocol_version="1", message_id="m", actions=[theirs]))
    assert actions(engine.seen[1]) == [asked.ACTION_TYPE, "theirs"]


def test_batch_when_pages_were_damaged_then_every_prompt_of_it_computes():
    engine = Engine([DAMAGED], ["right"])
    assert ask(engine, input_ids=[[1, 2], [3, 4]]) == ["right"]
    assert [actions(hints) for hints in engine.seen[1]] == [[asked.ACTION_TYPE]] * 2


@pytest.mark.parametrize("is_over", [True, False])
def test_batch_when_its_client_has_named_the_prompts_then_the_second_runs_once_the_first_is_over(monkeypatch, is_over):
    class Given(Engine):
        """SGLang, which knows the second prompt until its rank has ended it."""

        async def _answers(self):
            if manager.rid_to_state:
                raise ValueError("Duplicate request ID detected: b")
            manager.rid_to_state["b"] = object()
            if is_over:
                asyncio.get_running_loop().call_later(0.01, manager.rid_to_state.clear)
            async for answer in super()._answers():
                yield answer

    monkeypatch.setattr(rerun, "MOST_LOOKS", 3)
    manager, engine = SimpleNamespace(**vars(MANAGER) | {"rid_to_state": {}}), Given([DAMAGED], ["right"])
    named = {"manager": manager, "input_ids": [[1, 2], [3, 4]], "rid": ["a", "b"]}
    if is_over:
        assert ask(engine, **named) == ["right"]
        return
    with pytest.raises(HTTPException, match=rerun.LOAD_FAILED):
        ask(engine, **named)


@pytest.mark.parametrize("end", [HTTPException(status_code=503, detail="something else"), ValueError("too long")])
def test_end_when_it_is_another_then_passed_on(end):
    engine = Engine([end], ["never"])
    with pytest.raises(type(end)):
        ask(engine)


def test_stream_when_tokens_were_given_then_no_second_run():
    assert ask(Engine(["first", ABORT], ["never"]), stream=True) == ["first", ABORT]


@pytest.mark.parametrize("several", [{"input_ids": [[1, 2], [3, 4]]}, {"sampling_params": {"n": 2}}])
def test_stream_when_it_is_of_several_prompts_or_samples_then_no_second_run_as_the_runbook_says(several):
    end = ABORT | {"index": 0}
    assert ask(Engine([end, "of the other"], ["never"]), stream=True, **several) == [end, "of the other"]
    page = " ".join((Path(__file__).parents[3] / "docs" / "runbook.md").read_text().split())
    assert "in three cases: several prompts in one stream, several samples of a prompt (`n`) in one stream" in page


def test_second_run_when_it_fails_too_then_the_client_is_told():
    with pytest.raises(HTTPException, match=rerun.LOAD_FAILED):
        ask(Engine([DAMAGED], [DAMAGED]))


def test_answer_when_banyan_is_off_then_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    with pytest.raises(HTTPException):
        ask(Engine([DAMAGED], ["never"]))


BY_HTTP, BY_GRPC, BY_A_PROGRAM = (
    Request({"type": "http", "path": "/generate", "headers": []}),
    SimpleNamespace(headers={}),
    None,
)


@pytest.mark.parametrize("config", [Config(), Config(share="off", policy="sglang")], ids=["on", "share off"])
@pytest.mark.parametrize("request_", [BY_GRPC, BY_A_PROGRAM], ids=["by gRPC", "by a program"])
def test_request_when_the_server_was_told_to_end_then_it_keeps_the_server_no_longer(monkeypatch, request_, config):
    monkeypatch.setattr(runtime, "config", lambda: config)
    monkeypatch.setattr(runtime, "is_sharing", lambda: config.shares)
    manager = SimpleNamespace(**vars(MANAGER) | {"gracefully_exit": True})
    around = faults.around(rerun.around_generate_request, "test")

    async def refused():
        engine = Engine(["never"])
        answers = around(engine.generate, manager, GenerateReqInput(input_ids=[1], sampling_params={}), request_)
        with pytest.raises(HTTPException, match="told to end") as error:
            await anext(answers)
        return engine.seen, error.value.status_code

    assert asyncio.run(refused()) == ([], 503)


def test_request_when_it_came_by_http_before_the_server_was_told_to_end_then_what_it_asks_for_is_answered():
    """Of one response with tools, or of a long sound, there are several prompts."""
    manager = SimpleNamespace(**vars(MANAGER) | {"gracefully_exit": True})
    assert ask(Engine(["an answer"]), BY_HTTP, manager) == ["an answer"]


@pytest.mark.parametrize("answer", ["an answer", ValueError("none")], ids=["answered", "refused"])
def test_id_when_its_request_is_over_then_it_is_free_at_once(monkeypatch, tmp_path, answer):
    """And not at the next look only: its client may ask another worker."""
    (tmp_path / "of all workers").touch()
    monkeypatch.setattr(taken_ids, "_path", lambda: str(tmp_path / "of all workers"))
    monkeypatch.setattr(taken_ids, "_is_looking", False)
    monkeypatch.setattr(runtime, "is_front", lambda: True)

    class Taking(Engine):
        def generate(self, manager, obj, request):
            taken_ids.take(obj.rid, manager)
            assert obj.rid in taken_ids._taken
            return super().generate(manager, obj, request)

    with nullcontext() if isinstance(answer, str) else pytest.raises(ValueError, match="none"):
        ask(Taking([answer]), rid="r")
    assert "r" not in taken_ids._taken


def asking(plan):
    """What the endpoints pass on of an HTTP request."""
    return SimpleNamespace(headers={PLAN_HEADER: plan} if plan else {})


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_pair_when_pages_were_damaged_then_the_room_is_used_up_and_the_router_is_told(monkeypatch, role):
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: role.value)
    engine = Engine([DAMAGED], ["never"])
    with pytest.raises(HTTPException, match=rerun.LOAD_FAILED):
        ask(engine, asking(None))
    assert len(engine.seen) == 1


def test_pair_when_the_router_asks_for_it_then_the_prompt_is_computed(monkeypatch):
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "prefill")
    engine = Engine(["right"], ["right"], ["right"])
    for plan in ("compute", None, "nonsense"):
        assert ask(engine, asking(plan)) == ["right"]
    assert actions(engine.seen[0]) == [asked.ACTION_TYPE]
    assert engine.seen[1:] == [None, None]


def test_pair_when_the_router_says_who_reads_then_the_request_carries_it(monkeypatch):
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "prefill")
    engine = Engine(["right"], ["right"], ["right"])
    for value in ("10.0.0.2:7400 992", "nonsense", ""):
        assert ask(engine, SimpleNamespace(headers={READ_HEADER: value})) == ["right"]
    assert actions(engine.seen[0]) == [READ_ACTION]
    assert payload_of(engine.seen[0], READ_ACTION) == {TEXT: "10.0.0.2:7400 992"}
    assert engine.seen[1:] == [None, None]


@pytest.mark.parametrize("role", [Role.ALONE, Role.PREFILL])
def test_request_when_the_router_names_a_source_then_it_carries_it_and_its_second_run_does_not(role, monkeypatch):
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: role.value)
    engine = Engine(["right"], ["right"], ["right"])
    for value in ("10.0.0.2:7400", "none", "nonsense"):
        assert ask(engine, SimpleNamespace(headers={SOURCE_HEADER: value})) == ["right"]
    payloads = [payload_of(hints, SOURCE_ACTION) for hints in engine.seen]
    assert payloads == [{TEXT: "10.0.0.2:7400"}, {TEXT: NOBODY}, None]
    if role is Role.ALONE:
        engine = Engine([DAMAGED], ["right"])
        assert ask(engine, SimpleNamespace(headers={SOURCE_HEADER: "10.0.0.2:7400"})) == ["right"]
        assert [actions(hints) for hints in engine.seen] == [[SOURCE_ACTION], [asked.ACTION_TYPE]]


class Said:
    """A request as SGLang has read it."""

    def __init__(self, fields, kind="application/json", **headers):
        self.fields, self.headers = fields, {"content-type": kind, **headers}

    async def json(self):
        assert self.headers["content-type"].lower().startswith("application/json"), "nothing is left to read"
        return json.loads(self.fields) if isinstance(self.fields, str) else self.fields


@pytest.mark.parametrize(
    ("request_", "is_named"),
    [
        (Said({"prompt_cache_key": "k"}), True),
        (Said({}, **{"x-session-id": "k"}), True),
        (Said(None, "multipart/form-data", **{"x-session-id": "k"}), True),
        (Said(None, "multipart/form-data; boundary=application/json", **{"x-session-id": "k"}), True),
        (Said("", **{"x-session-id": "k"}), True),
        (Said({"prompt_cache_key": "k"}, "Application/JSON; charset=utf-8"), True),
        (Said(["k"]), False),
        (Said({"prompt": "k"}), False),
        (SimpleNamespace(headers={}), False),
    ],
)
def test_request_when_its_client_names_a_conversation_by_the_way_then_the_dispatcher_is_told_a_hash(request_, is_named):
    engine = Engine(["right"])
    assert ask(engine, request_) == ["right"]
    name = payload_of(engine.seen[0], SESSION_ACTION)
    assert name == ({"name": conversation_of({"prompt_cache_key": "k"}, {})} if is_named else None)


@pytest.mark.parametrize("broken", [{"actions": 1}, {"a": 1}, 7, [7]])
def test_request_when_its_hints_are_no_envelope_then_it_goes_on_to_sglang_which_refuses_it(broken):
    obj = GenerateReqInput(input_ids=[1], kv_hints=broken)
    assert rerun._marked(obj, SESSION_ACTION, {"name": "k"}).kv_hints == broken
    with pytest.raises(ValueError):
        ask(Engine(["right"]), Said({}, **{"x-session-id": "k"}), kv_hints=broken)


LOADED = LoRARef(lora_name="later", lora_path="/adapters/later")


@pytest.mark.parametrize("role", [Role.ALONE, Role.DECODE])
@pytest.mark.parametrize("name", ["banyan-adapter-" + "a" * 64, LOADED.lora_id], ids=["by content", "by its load"])
@pytest.mark.parametrize("extra_key", ["{}", "tenant {}", ["tenant", "{} more"]], ids=str)
def test_request_when_its_extra_key_holds_the_id_of_an_adapter_then_refused(monkeypatch, role, name, extra_key):
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: role.value)
    manager, engine = SimpleNamespace(**vars(MANAGER), lora_registry=LoRARegistry([LOADED])), Engine(["an answer"])
    keys = extra_key.format(name) if isinstance(extra_key, str) else [one.format(name) for one in extra_key]
    with pytest.raises(ValueError, match="id of a LoRA adapter: ask for one with lora_path"):
        ask(engine, manager=manager, extra_key=keys)
    assert engine.seen == []


def test_request_when_its_extra_key_names_no_adapter_then_it_is_answered():
    manager = SimpleNamespace(**vars(MANAGER), lora_registry=LoRARegistry([LOADED]))
    assert ask(Engine(["an answer"]), manager=manager, extra_key="adapter later", lora_path="later") == ["an answer"]
