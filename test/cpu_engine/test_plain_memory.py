# SPDX-License-Identifier: Apache-2.0
"""Adapters and states on a machine without a CUDA driver: plain memory where SGLang asks for pinned, and only there."""

import pytest
import torch

from banyan_cpu_engine import plain_memory, server


@pytest.fixture
def torch_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    for name in plain_memory.FACTORIES:
        monkeypatch.setattr(torch, name, getattr(torch, name))


def start(monkeypatch, *, is_on, has_driver):
    monkeypatch.setattr(server, "is_on", lambda: is_on)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_driver)
    plain_memory.before_pinned_memory(object(), base_model=None)


def test_memory_when_there_is_no_driver_then_pinned_is_plain(torch_as_it_was, monkeypatch):
    start(monkeypatch, is_on=True, has_driver=False)
    for made in (torch.tensor([1, 2], dtype=torch.int32, pin_memory=True), torch.empty(3, pin_memory=True)):
        assert not made.is_pinned()
    plain = torch.ones(2)
    assert plain.pin_memory() is plain
    assert torch.tensor([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]


@pytest.mark.parametrize("is_on, has_driver", [(False, False), (True, True)])
def test_memory_when_the_engine_is_off_or_a_driver_is_there_then_torch_is_left_alone(
    torch_as_it_was, monkeypatch, is_on, has_driver
):
    before = [torch.Tensor.pin_memory, *(getattr(torch, name) for name in plain_memory.FACTORIES)]
    start(monkeypatch, is_on=is_on, has_driver=has_driver)
    assert [torch.Tensor.pin_memory, *(getattr(torch, name) for name in plain_memory.FACTORIES)] == before
