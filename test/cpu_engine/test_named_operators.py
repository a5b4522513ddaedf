# SPDX-License-Identifier: Apache-2.0
"""Operators that the CPU stand-in of sgl_kernel has in name only: SGLang takes them when it is imported."""

import importlib

import pytest
import sgl_kernel
import torch
from sgl_kernel import named


def test_processor_of_images_when_sglang_imports_it_then_qwens_models_have_one():
    module = importlib.import_module("sglang.srt.multimodal.processors.qwen_vl")
    assert "Qwen2_5_VLForConditionalGeneration" in {model.__name__ for model in module.QwenVLImageProcessor.models}


@pytest.mark.parametrize("name", named.NAMED)
def test_operator_when_it_is_called_then_it_says_that_it_is_missing(name):
    for operator in (getattr(torch.ops.sgl_kernel, name), getattr(sgl_kernel, name)):
        with pytest.raises(NotImplementedError, match=name):
            operator(torch.zeros(1))


def test_operator_when_somebody_has_defined_it_then_it_stays(monkeypatch):
    own = object()
    monkeypatch.setattr(torch.ops.sgl_kernel, named.NAMED[0], own)
    named.name_operators()
    assert getattr(torch.ops.sgl_kernel, named.NAMED[0]) is own


def test_operator_when_it_is_there_then_sglang_takes_it_by_its_name():
    assert {getattr(torch.ops.sgl_kernel, operator.__name__) for operator in named.OPERATORS} == set(named.OPERATORS)
