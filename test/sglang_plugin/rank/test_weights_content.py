# SPDX-License-Identifier: Apache-2.0
"""Weights named by their bytes: equal ones alike, any others apart, on one shard or on another."""

from types import SimpleNamespace

import pytest
import torch

from banyan.sglang_plugin.rank import weights_content
from banyan.sglang_plugin.rank.weights_content import UNKNOWN, agreed_digest, own_digest


def model(**changed):
    module = torch.nn.Linear(4, 4, bias=False)
    module.register_buffer("scale", torch.ones(1))
    module.register_buffer("table", torch.ones(1), persistent=False)
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


def test_digest_when_what_no_trainer_brings_differs_then_the_same():
    assert own_digest(updater(model(table=2.0))) == own_digest(updater(model()))


@pytest.mark.parametrize(
    "other",
    [
        updater(model(weight=1.0)),
        updater(model(scale=2.0)),
        updater(model().to(torch.bfloat16)),
        updater(model(), draft=model()),
        updater(model(), draft=model(scale=2.0)),
    ],
)
def test_digest_when_a_weight_a_scale_a_type_or_the_draft_differs_then_another(other):
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
    return others


def test_agreement_when_another_shard_has_other_weights_then_another_name(group):
    own, names = bytes([1] * 32), set()
    for other in (own, bytes([2] * 32)):
        group[:] = [other]
        names.add(agreed_digest(own, None))
    assert len(names) == 2 and "" not in names


def test_agreement_when_one_shard_cannot_tell_then_no_name(group):
    group[:] = [UNKNOWN]
    assert agreed_digest(bytes([1] * 32), None) == ""
