# SPDX-License-Identifier: Apache-2.0
"""What a rank finds when it builds its parts, and does not know how to share: the start ends with one line."""

from types import SimpleNamespace

import pytest
import torch
from test.sglang_plugin.rank.test_linker import POOL, SERVER

from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools import choose
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool
from banyan.sglang_plugin.rank import identity


def identity_with_models_from_elsewhere(monkeypatch):
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "models.of.ours")
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(identity, "get_lora", lambda: SimpleNamespace(lora_paths=None))
    pools = SimpleNamespace(pool=SimpleNamespace(dtype=torch.bfloat16), drafts=(), identity=())
    identity.Identity(SERVER, Config(store=("/kv",)), pools, {"server": "s", "engine": "e", "noted": []})


class AllocatorOfAnotherPlugin:
    pass


def another_allocator(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    choose.around_get_paged_allocator_cls(lambda platform: AllocatorOfAnotherPlugin, None)


def host_pool_of_another_layout(monkeypatch):
    SharedMHAPool(**POOL, kv_cache_layout="vectorized_5d")


def device_pool_of_another_layout(monkeypatch):
    DeviceMHAPool(**POOL, kv_cache_layout="vectorized_5d")


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (identity_with_models_from_elsewhere, "SGLANG_EXTERNAL_MODEL_PACKAGE=models.of.ours"),
        (another_allocator, "AllocatorOfAnotherPlugin"),
        (host_pool_of_another_layout, "vectorized_5d MHA pool"),
        (device_pool_of_another_layout, "vectorized_5d MHA pool"),
    ],
)
def test_start_when_a_part_is_none_that_banyan_shares_then_refused_by_name(monkeypatch, capsys, build, found):
    with pytest.raises((SystemExit, runtime.Refused)):
        build(monkeypatch)
    assert found in capsys.readouterr().err
