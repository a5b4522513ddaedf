# SPDX-License-Identifier: Apache-2.0
"""KV of eight bits on the CPU engine: which type pools get, and that what they keep are numbers."""

import pytest
import torch

from banyan_cpu_engine import ATTENTION_BACKEND, float8, server


def configured(monkeypatch, dtype, *, is_on=True, backends=(ATTENTION_BACKEND,) * 2):
    monkeypatch.setattr(server, "is_on", lambda: is_on)
    monkeypatch.setattr(float8, "attention_backends", lambda: backends)
    return float8.around_configure_kv_cache_dtype(lambda **asked: (None, dtype), server_args_kv_cache_dtype="any")


def test_type_when_torch_attends_on_a_cpu_then_it_is_the_one_that_torch_can_read(monkeypatch):
    assert configured(monkeypatch, torch.float8_e4m3fn) == (None, torch.float8_e4m3fnuz)


@pytest.mark.parametrize("told", [{"is_on": False}, {"backends": ("intel_amx",) * 2}], ids=["off", "AMX"])
def test_type_when_another_reads_the_pool_then_it_is_left_alone(monkeypatch, told):
    assert configured(monkeypatch, torch.float8_e4m3fn, **told) == (None, torch.float8_e4m3fn)


def test_type_when_kv_is_not_of_eight_bits_then_it_is_left_alone(monkeypatch):
    assert configured(monkeypatch, torch.bfloat16) == (None, torch.bfloat16)


def test_values_when_they_are_beyond_the_type_then_they_are_its_largest_number():
    values = torch.tensor([-1e4, -3.0, 0.0, 240.0, 448.0])
    kept, nothing = float8.within_range(torch.float8_e4m3fnuz, values, None)
    assert nothing is None
    assert kept.to(torch.float8_e4m3fnuz).float().tolist() == [-240.0, -3.0, 0.0, 240.0, 240.0]
    assert values.to(torch.float8_e4m3fnuz).float().isnan().tolist() == [True, False, False, False, True]


def test_values_when_the_pool_has_another_type_then_they_are_the_same_tensors():
    values = torch.tensor([1e4])
    assert float8.within_range(torch.bfloat16, values)[0] is values
