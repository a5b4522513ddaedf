# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor MODEL`` makes of what SGLang's side says of a model."""

import json
import subprocess
from types import SimpleNamespace

from banyan.cli import doctor_sglang, main

SHARED = {
    "architecture": "DeepseekV32ForCausalLM",
    "refused": None,
    "page_tokens": 64,
    "num_layers": 2,
    "dtype": "bfloat16",
    "bytes_by_part": {"latents": 147456, "index keys": 16896},
    "takes_media": False,
}


def test_model_when_it_is_shared_then_a_page_is_weighed_part_by_part():
    found = doctor_sglang.model_finding(SHARED)
    assert found.is_ok and "64 tokens weighs 164352 bytes (latents 147456, index keys 16896)" in found.detail
    assert "2568 bytes a token" in found.detail


def test_model_when_it_keeps_states_then_one_of_them_is_weighed_too():
    assert "state" not in doctor_sglang.model_finding(SHARED).detail
    states = {"state_bytes_by_part": {"recurrent states": 32768, "convolution inputs": 3072}, "num_state_layers": 2}
    detail = doctor_sglang.model_finding({**SHARED, **states}).detail
    assert "weighs 35840 bytes (recurrent states 32768, convolution inputs 3072) over 2 other layers" in detail


def test_model_when_it_takes_images_then_what_the_dispatcher_knows_of_them():
    assert not doctor_sglang.model_finding(SHARED).hint
    found = doctor_sglang.model_finding({**SHARED, "takes_media": True})
    assert found.is_ok and "--mm-preprocess-cache-size-mb" in found.hint


def test_model_when_it_is_refused_then_the_reason_and_the_way_out_are_those_of_a_server():
    found = doctor_sglang.model_finding({"architecture": "A", "refused": "this model (A) caches states: use another"})
    assert not found.is_ok and found.detail == "this model (A) caches states" and found.advice == "use another"


def test_model_when_sglang_cannot_read_it_then_its_last_word_is_said(monkeypatch):
    said = SimpleNamespace(stdout="", stderr="Traceback\nOSError: no config.json\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: said)
    found = doctor_sglang.examine_model("/nowhere")
    assert not found.is_ok and "/nowhere: OSError: no config.json" in found.detail


def test_model_when_it_has_a_draft_then_both_are_asked_for(monkeypatch):
    asked = []
    said = SimpleNamespace(stdout=json.dumps(SHARED) + "\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: asked.append(command[-2:]) or said)
    assert doctor_sglang.examine_model("/model", "/draft").is_ok and doctor_sglang.examine_model("/model").is_ok
    assert asked == [["/model", "/draft"], [doctor_sglang.DESCRIBE, "/model"]]


def test_draft_when_no_model_is_named_then_it_is_asked_of_which(capsys):
    assert main(["doctor", "--draft", "/draft"]) == 2
    assert "of which MODEL" in capsys.readouterr().err
