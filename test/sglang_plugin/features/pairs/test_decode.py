# SPDX-License-Identifier: Apache-2.0
"""What a decode server's scheduler does at the end of a step."""

from types import SimpleNamespace

import pytest

from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.rank import decode
from banyan.features.pairs.rank.decode import after_process_decode_queue
from banyan.sglang_plugin import runtime


@pytest.mark.parametrize("is_sharing", [True, False])
def test_decode_queue_when_it_was_processed_then_completions_are_collected_where_there_is_a_linker(
    monkeypatch, is_sharing
):
    monkeypatch.setattr(runtime, "is_sharing", lambda: is_sharing)
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: True)
    collected = []
    monkeypatch.setattr(decode.taking_back, "collect", lambda: None)
    tree = SimpleNamespace(check_hicache_events=lambda: collected.append(True))
    after_process_decode_queue(None, SimpleNamespace(tree_cache=tree))
    assert len(collected) == is_sharing


@pytest.mark.parametrize(
    ("waiting", "is_running", "is_on_gpu", "num_pauses"),
    [([], False, False, 1), (["handed over"], False, False, 0), ([], True, False, 0), ([], False, True, 0)],
)
def test_decode_queue_when_nothing_is_to_be_computed_then_a_cpus_scheduler_pauses(
    monkeypatch, waiting, is_running, is_on_gpu, num_pauses
):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: is_on_gpu)
    monkeypatch.setattr(decode.taking_back, "collect", lambda: None)
    paused_s = []
    monkeypatch.setattr(decode, "_pauses", Pauses(paused_s.append))
    scheduler = SimpleNamespace(
        tree_cache=SimpleNamespace(check_hicache_events=lambda: None),
        waiting_queue=waiting,
        running_batch=SimpleNamespace(is_empty=lambda: not is_running),
    )
    after_process_decode_queue(None, scheduler)
    assert len(paused_s) == num_pauses
