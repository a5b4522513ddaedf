# SPDX-License-Identifier: Apache-2.0
"""Texts that would keep the main process."""

import json
import time
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.pythonic_detector import PythonicDetector

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import texts
from banyan.sglang_plugin.prompt_refusals import BadRequest


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setattr(runtime, "config", object)


@pytest.mark.parametrize("kwargs", [{"chat_template": "x"}, {"chat_template": None, "thinking": True}])
@pytest.mark.parametrize("is_trusted", [False, True])
def test_template_when_a_client_brings_one_then_only_a_server_that_trusts_them_takes_it(
    monkeypatch, kwargs, is_trusted
):
    monkeypatch.setattr(texts, "get_serving", lambda: SimpleNamespace(trust_request_chat_template=is_trusted))
    for asked in (SimpleNamespace(chat_template_kwargs=kwargs), kwargs):
        if is_trusted:
            texts.before_template(None, asked)
            continue
        with pytest.raises(BadRequest, match="--trust-request-chat-template"):
            texts.before_template(None, asked)
    for other in (SimpleNamespace(chat_template_kwargs=None), {"thinking": True}, {}):
        texts.before_template(None, other)


CALLS = "[" + ", ".join(f"f(a{number}={number})" for number in range(40)) + "]"
ONE = "[f(" + ", ".join(f"a{number}={number}" for number in range(40)) + ")]"

ENDS = (", ]", "), 5]", "),]", ", 5)]")
MANY = ", ".join(f"a{number}=1" for number in range(60))


@pytest.mark.parametrize("text", ["[a(" + "a=," * 60, "x" + "a=," * 60, *(f"[a({MANY}{end}" for end in ENDS)])
def test_search_when_there_are_no_calls_in_what_looks_like_many_then_it_ends_at_once(text):
    detector, begun_s = PythonicDetector(), time.monotonic()
    assert texts.around_search(PythonicDetector.has_tool_call, detector, text) is False
    found = texts.around_search(PythonicDetector.detect_and_parse, detector, text, [])
    assert (found.normal_text, found.calls) == (text, []) and time.monotonic() - begun_s < 5


AROUND = (f"I call {CALLS} now", f"{CALLS}\n\nSee [1].", f"[note] {CALLS}", f"<|python_start|>{CALLS}<|python_end|>")


@pytest.mark.parametrize("text", [CALLS, *AROUND, "[f(a=1)]", "no call", ""])
def test_search_when_calls_are_there_or_little_is_then_sglang_finds_what_it_found_before(text):
    detector = PythonicDetector()
    assert texts.around_search(PythonicDetector.has_tool_call, detector, text) == detector.has_tool_call(text)
    found = texts.around_search(PythonicDetector.detect_and_parse, detector, text, [])
    assert found == detector.detect_and_parse(text, [])


@pytest.mark.parametrize("text", [ONE, f"I call {ONE} now", f"<|python_start|>[g(a=1), {ONE[1:]}"])
def test_search_when_a_call_has_many_arguments_then_it_is_found_at_once(text):
    detector, begun_s = PythonicDetector(), time.monotonic()
    tools = [Tool(function=Function(name="f"))]
    assert texts.around_search(PythonicDetector.has_tool_call, detector, text) is True
    found = texts.around_search(PythonicDetector.detect_and_parse, detector, text, tools)
    (call,) = found.calls
    assert json.loads(call.parameters) == {f"a{number}": number for number in range(40)}
    assert found.normal_text == ("I call  now" if "I call" in text else "") and time.monotonic() - begun_s < 5


def test_search_when_what_looks_like_many_calls_names_no_arguments_then_it_is_text():
    text = "[f(" + ", ".join(f"a == {number}" for number in range(20)) + ")]"
    assert texts.around_search(PythonicDetector.has_tool_call, PythonicDetector(), text) is False
