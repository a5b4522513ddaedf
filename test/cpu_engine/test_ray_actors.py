# SPDX-License-Identifier: Apache-2.0
"""The device that an actor of Ray's sets: none on a server of the engine."""

import pytest
import torch

from banyan_cpu_engine import ray_actors, server


@pytest.mark.parametrize(("is_on", "expected"), [(True, []), (False, [1])])
def test_actor_when_it_sets_its_device_then_only_where_the_engine_does_not_serve(monkeypatch, is_on, expected):
    asked_for = []
    monkeypatch.setattr(torch.cuda, "set_device", asked_for.append)
    monkeypatch.setattr(server, "is_on", lambda: is_on)
    ray_actors.register()
    torch.cuda.set_device(1)
    assert asked_for == expected
