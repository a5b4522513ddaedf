# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor MODEL`` makes of what SGLang's side says of a model."""

import subprocess
from types import SimpleNamespace

from banyan.cli import doctor_model

SHARED = {
    "architecture": "DeepseekV32ForCausalLM",
    "refused": None,
    "page_tokens": 64,
    "num_layers": 2,
    "dtype": "bfloat16",
    "bytes_by_part": {"latents": 147456, "index keys": 16896},
}


def test_model_when_it_is_shared_then_a_page_is_weighed_part_by_part():
    found = doctor_model.finding_of(SHARED)
    assert found.is_ok and "64 tokens weighs 164352 bytes (latents 147456, index keys 16896)" in found.detail
    assert "2568 bytes a token" in found.detail


def test_model_when_it_is_refused_then_the_reason_and_the_way_out_are_those_of_a_server():
    found = doctor_model.finding_of({"architecture": "A", "refused": "this model (A) caches states: use another"})
    assert not found.is_ok and found.detail == "this model (A) caches states" and found.advice == "use another"


def test_model_when_sglang_cannot_read_it_then_its_last_word_is_said(monkeypatch):
    said = SimpleNamespace(stdout="", stderr="Traceback\nOSError: no config.json\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: said)
    found = doctor_model.examine_model("/nowhere")
    assert not found.is_ok and "/nowhere: OSError: no config.json" in found.detail
