# SPDX-License-Identifier: Apache-2.0
"""Which classes SGLang is given for each engine of hand-overs."""

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

from banyan.features.pairs.rank import by_mooncake, by_nixl, hand_over, kv_classes
from banyan.sglang_plugin import runtime


def classes(backend):
    return [kv_classes.around_get_kv_class(lambda *asked: asked[1], backend, kind) for kind in KVClassType]


@pytest.mark.parametrize(
    ("backend", "engine"), [(TransferBackend.NIXL, by_nixl), (TransferBackend.MOONCAKE, by_mooncake)]
)
def test_classes_when_the_engine_is_known_then_manager_sender_and_receiver_are_banyans(backend, engine, monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(secret_file=""))
    hand_over.receiver_class.cache_clear()
    mine = engine.CLASSES
    assert len(mine) == 3
    assert classes(backend) == [mine.get(kind, kind) for kind in KVClassType]
    assert classes(TransferBackend.FAKE) == list(KVClassType)


def test_classes_when_banyan_is_off_then_all_are_sglangs(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert classes(TransferBackend.NIXL) == classes(TransferBackend.MOONCAKE) == list(KVClassType)
