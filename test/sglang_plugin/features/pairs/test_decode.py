# SPDX-License-Identifier: Apache-2.0
"""What a decode server's scheduler does at the end of a step."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from test.sglang_plugin.features.pairs.test_prefill_servers import ROOM, DecodeTables, receiver_of

from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.rank import by_nixl, decode
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
    queue = SimpleNamespace(pending_reqs=[])
    after_process_decode_queue(None, SimpleNamespace(tree_cache=tree, disagg_decode_prealloc_queue=queue))
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
        disagg_decode_prealloc_queue=SimpleNamespace(pending_reqs=[]),
        waiting_queue=waiting,
        running_batch=SimpleNamespace(is_empty=lambda: not is_running),
    )
    after_process_decode_queue(None, scheduler)
    assert len(paused_s) == num_pauses


def test_request_when_no_rank_of_its_prefill_server_says_to_have_it_then_it_ends_after_sglangs_time_out(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: True)
    monkeypatch.setattr(decode.taking_back, "collect", lambda: None)
    manager, now_s = DecodeTables(), 1000.0
    manager.waiting_timeout, manager.prefill_response_tracker = 300, {}
    manager.addr_to_rooms_tracker = defaultdict(set)
    monkeypatch.setattr(decode.time, "monotonic", lambda: now_s)
    queue = SimpleNamespace(pending_reqs=[])
    tree = SimpleNamespace(check_hicache_events=lambda: None)

    def pending(room):
        receiver = receiver_of(by_nixl, manager)
        receiver.bootstrap_room, receiver.conclude_state, receiver.abort_notified = room, None, False
        manager.update_status(room, KVPoll.Bootstrapping)
        return SimpleNamespace(req=SimpleNamespace(bootstrap_room=room), kv_receiver=receiver)

    def states():
        after_process_decode_queue(None, SimpleNamespace(tree_cache=tree, disagg_decode_prealloc_queue=queue))
        return [manager.request_status[each.req.bootstrap_room] for each in queue.pending_reqs]

    queue.pending_reqs = [pending(ROOM)]
    assert states() == [KVPoll.Bootstrapping]
    now_s += 200
    queue.pending_reqs.append(pending(ROOM + 1))
    assert states() == [KVPoll.Bootstrapping] * 2
    now_s += 200
    assert states() == states() == [KVPoll.Failed, KVPoll.Bootstrapping]
    with pytest.raises(KVTransferError, match=decode.UNCLAIMED):
        queue.pending_reqs.pop(0).kv_receiver.failure_exception()
    queue.pending_reqs = []
    assert states() == [] and not decode._pending_since_s and not manager.failure_records
