# SPDX-License-Identifier: Apache-2.0
"""Memory that is given to a trainer on a machine without a CUDA driver: nobody asks for one."""

import pytest
import torch

from banyan_cpu_engine import released_memory, server


@pytest.fixture
def start(monkeypatch):
    def run(*, is_on=True, has_driver=False):
        monkeypatch.setattr(server, "is_on", lambda: is_on)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_driver)

    return run


@pytest.mark.parametrize(("case", "is_cpu"), [({}, True), ({"is_on": False}, False), ({"has_driver": True}, True)])
def test_release_when_sglang_waits_for_a_device_then_it_is_the_one_that_serves(start, monkeypatch, case, is_cpu):
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: torch.cpu if device == "cpu" else torch.cuda)
    named = torch.get_device_module
    start(**case)
    waited_for = released_memory.around_release(lambda updater, command: torch.get_device_module(), object(), object())
    assert waited_for is (torch.cpu if is_cpu else torch.cuda)
    assert torch.get_device_module is named
