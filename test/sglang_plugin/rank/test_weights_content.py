# SPDX-License-Identifier: Apache-2.0
"""Weights named by their bytes: equal ones alike, any others apart, on one shard or on another."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.lora.layers import BaseLayerWithLoRA

from banyan.sglang_plugin.rank import shards, weights_content
from banyan.sglang_plugin.rank.weights_content import FAILED, UNKNOWN, agreed_digest, own_digest


def model(**changed):
    module = torch.nn.Linear(4, 4, bias=False)
    module.register_buffer("scale", torch.ones(1))
    module.register_buffer("derived", torch.ones(1), persistent=False)
    module.register_buffer("cos_sin_cache", torch.ones(1), persistent=False)
    module.w_kc = torch.ones(2, 2).transpose(0, 1)
    with torch.no_grad():
        module.weight.copy_(torch.arange(16).reshape(4, 4))
        for name, value in changed.items():
            getattr(module, name).fill_(value)
    return module


def updater(target, draft=None):
    def worker(role, module):
        return SimpleNamespace(weight_update_runners=lambda: [(role, SimpleNamespace(model=module))])

    return SimpleNamespace(
        tp_worker=worker("target", target), draft_worker=None if draft is None else worker("draft", draft)
    )


def test_digest_when_the_bytes_are_the_same_then_the_same():
    assert own_digest(updater(model())) == own_digest(updater(model())) != UNKNOWN


def test_digest_when_a_table_differs_that_comes_of_the_configuration_then_the_same():
    """SGLang's own check passes these over, too."""
    assert own_digest(updater(model(cos_sin_cache=2.0))) == own_digest(updater(model()))


def with_adapter(slots, derived=1.0):
    """As SGLang puts adapters around a layer: their slots are tensors of the module that stands in its place."""
    module = torch.nn.Module()
    module.proj = BaseLayerWithLoRA(model(derived=derived), None)
    module.proj.A_buffer = module.proj.lora_a = torch.full((2, 4), slots)
    return updater(module)


def test_digest_when_ranks_have_served_other_adapters_then_the_same():
    """They would never lend to each other again."""
    assert own_digest(with_adapter(1.0)) == own_digest(with_adapter(2.0)) != UNKNOWN
    assert own_digest(with_adapter(1.0, derived=2.0)) != own_digest(with_adapter(1.0))


def test_digest_when_what_a_model_derives_is_of_weights_before_then_another():
    """As where a trainer writes past the loader: the parameters are equal, and what is computed is not."""
    fresh, stale = GemmaRMSNorm(4), GemmaRMSNorm(4)
    fresh.weight.weight_loader(fresh.weight, torch.full((4,), 0.5))
    with torch.no_grad():
        stale.weight.fill_(0.5)
    assert own_digest(updater(fresh)) != own_digest(updater(stale))
    stale.refresh_gemma_weight()
    assert own_digest(updater(fresh)) == own_digest(updater(stale)) != UNKNOWN


@pytest.mark.parametrize(
    "other",
    [
        updater(model(weight=1.0)),
        updater(model(scale=2.0)),
        updater(model(derived=2.0)),
        updater(model(w_kc=2.0)),
        updater(model().to(torch.bfloat16)),
        updater(model(), draft=model()),
        updater(model(), draft=model(scale=2.0)),
    ],
)
def test_digest_when_anything_that_is_computed_with_differs_then_another(other):
    assert own_digest(other) not in (own_digest(updater(model())), UNKNOWN)


def test_digest_when_a_model_cannot_be_read_then_unknown_with_a_line(caplog):
    assert own_digest(updater(SimpleNamespace())) == UNKNOWN
    assert caplog.text.count("stay with this server") == 1


@pytest.fixture
def group(monkeypatch):
    """The shards of a rank: what the others tell."""
    others = []

    def gather(told, mine, group):
        for place, one in zip(told, [mine, *others], strict=True):
            place.copy_(torch.frombuffer(bytearray(one), dtype=torch.uint8) if isinstance(one, bytes) else one)

    monkeypatch.setattr(weights_content.torch.distributed, "get_world_size", lambda group: 1 + len(others))
    monkeypatch.setattr(weights_content.torch.distributed, "all_gather", gather)
    parallel = SimpleNamespace(attn_dp_enabled=True, enable_dp_attention_local_control_broadcast=False)
    monkeypatch.setattr(shards, "get_parallel", lambda: parallel)
    return SimpleNamespace(others=others, parallel=parallel)


def test_agreement_when_another_shard_has_other_weights_then_another_name(group):
    own, names = bytes([1] * 32), set()
    for other in (own, bytes([2] * 32)):
        group.others[:] = [other]
        names.add(agreed_digest(own, None))
    assert len(names) == 2 and not names & {UNKNOWN, FAILED}


@pytest.mark.parametrize(("others", "agreed"), [([UNKNOWN], UNKNOWN), ([FAILED], FAILED), ([FAILED, UNKNOWN], FAILED)])
def test_agreement_when_one_shard_cannot_tell_or_has_failed_then_no_name(group, others, agreed):
    group.others[:] = others
    assert agreed_digest(bytes([1] * 32), None) == agreed


def test_agreement_when_a_command_reaches_shards_in_different_steps_then_they_do_not_wait_for_each_other(group):
    """Between two steps SGLang has something of its own in that group."""
    group.parallel.enable_dp_attention_local_control_broadcast = True
    group.others[:] = ["nothing that could be gathered"]
    assert agreed_digest(bytes([1] * 32), None) == FAILED
