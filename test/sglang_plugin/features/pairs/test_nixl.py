# SPDX-License-Identifier: Apache-2.0
"""A prefill server that gives a request up tells its decode server, now or when it asks. SGLang's own methods on a
manager without network and NIXL."""

import queue
import sys
import threading
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend

from banyan.features.pairs import Pauses
from banyan.features.pairs.rank import decode, kv_classes, nixl
from banyan.features.pairs.rank.decode import after_process_decode_queue
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.reporting import report
from banyan.telemetry import Counters

ROOM = 11
DECODE = ("10.0.0.2", 4242)


@pytest.fixture
def manager():
    """SGLang's tables, and a list of what decode servers were told."""
    made = nixl.BanyanNixl.__new__(nixl.BanyanNixl)
    made.prepare_advances()
    made._given_up, made._given_up_lock = {}, threading.Lock()
    made.request_status, made.transfer_infos, made.failure_records = {}, {}, {}
    made.failure_lock = threading.Lock()
    made.deferred_bootstrap = None
    made._deferred_ack_targets, made._deferred_ack_poisoned_rooms, made._staging_outstanding = {}, set(), {}
    made.told = []
    made.send_kv_status_message = lambda **said: made.told.append(said)
    return made


def asks(manager, room=ROOM):
    """What SGLang's bootstrap thread does when a decode server has sent all that a transfer needs."""
    info = SimpleNamespace(room=room, endpoint=DECODE[0], dst_port=DECODE[1], is_dummy=False)
    manager.transfer_infos[room] = {"agent": info}
    manager.update_status(room, KVPoll.WaitingForInput)


def sender_of(manager, room=ROOM):
    sender = nixl.BanyanKVSender.__new__(nixl.BanyanKVSender)
    sender.kv_mgr, sender.bootstrap_room, sender.conclude_state = manager, room, None
    sender.trace_ctx = SimpleNamespace(abort=lambda **_: None, trace_req_finish=lambda: None)
    manager.update_status(room, KVPoll.Bootstrapping)
    manager.rooms.claim(room)
    return sender


def failures(manager):
    return [said["targets"] for said in manager.told if said["status"] == KVPoll.Failed and said["targets"]]


def test_abort_when_the_decode_server_waits_then_it_is_told_at_once(manager):
    sender = sender_of(manager)
    asks(manager)
    sender.abort()
    assert failures(manager) == [[DECODE]]
    assert manager.request_status[ROOM] == KVPoll.Failed


def test_abort_when_the_decode_server_has_not_asked_yet_then_it_is_told_when_it_asks(manager):
    sender = sender_of(manager)
    sender.abort()
    assert failures(manager) == []
    manager.request_status.pop(ROOM)
    asks(manager)
    assert failures(manager) == [[DECODE]]
    assert ROOM not in manager.request_status and ROOM not in manager.transfer_infos
    assert not manager.failure_records


def test_abort_when_everything_was_sent_then_the_decode_server_keeps_it(manager):
    sender = sender_of(manager)
    asks(manager)
    manager.update_status(ROOM, KVPoll.Success)
    sender.abort()
    assert failures(manager) == []


def test_rooms_when_many_were_given_up_then_the_oldest_are_forgotten(manager, monkeypatch):
    monkeypatch.setattr(nixl, "MAX_GIVEN_UP", 2)
    for room in (1, 2, 3):
        sender_of(manager, room).abort()
    for room in (1, 2, 3):
        manager.request_status.pop(room)
        asks(manager, room)
    assert len(failures(manager)) == 2 and manager.request_status == {1: KVPoll.WaitingForInput}


def test_status_when_nothing_was_given_up_then_it_is_sglangs(manager):
    sender_of(manager)
    asks(manager)
    assert manager.request_status[ROOM] == KVPoll.WaitingForInput and manager.told == []


def test_transfer_when_a_chunk_is_queued_then_its_pages_count_once_and_those_of_a_room_that_is_over_do_not(
    manager, monkeypatch
):
    counters = Counters()
    linker = SimpleNamespace(counters=counters)
    monkeypatch.setattr(report, "_linker", lambda: linker)
    manager.disaggregation_mode, manager.enable_staging = DisaggregationMode.PREFILL, False
    manager.transfer_queues = [queue.Queue()]
    asks(manager)
    manager.add_transfer_request(ROOM, [4, 7, 8], slice(0, 3), False)
    manager.add_transfer_request(ROOM + 1, [5], slice(0, 1), False)
    assert counters.handed_over_pages == 3
    assert manager.transfer_queues[0].get_nowait().prefill_kv_indices == [4, 7, 8]


@pytest.mark.parametrize(("dp_size", "dp_rank", "attn_dp_rank", "named"), [(2, 1, 0, 1), (1, 0, 0, 0), (1, 0, 1, 1)])
def test_rank_when_it_is_named_for_a_room_then_it_is_the_one_that_decode_servers_look_up(
    manager, monkeypatch, dp_size, dp_rank, attn_dp_rank, named
):
    manager.system_dp_size, manager.system_dp_rank, manager.attn_dp_rank = dp_size, dp_rank, attn_dp_rank
    manager.attn_dp_rank = nixl.rank_to_name(manager)
    told = []
    answer = SimpleNamespace(status_code=200)
    monkeypatch.setattr(conn.requests, "post", lambda url, json, timeout: told.append((url, json)) or answer)
    sender = sender_of(manager)
    sender.bootstrap_server_url = "p:1"
    sender._register_prefill_dp_rank()
    assert told == [("http://p:1/register_dp_rank", {"bootstrap_room": ROOM, "dp_rank": named})]


def classes(backend):
    return [kv_classes.around_get_kv_class(lambda *asked: asked[1], backend, kind) for kind in KVClassType]


def test_classes_when_the_backend_is_nixl_then_manager_and_sender_are_banyans(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(secret_file=""))
    nixl.receiver_class.cache_clear()
    mine = {
        KVClassType.MANAGER: nixl.BanyanNixl,
        KVClassType.SENDER: nixl.BanyanKVSender,
        KVClassType.RECEIVER: nixl.BanyanKVReceiver,
    }
    assert classes(TransferBackend.NIXL) == [mine.get(kind, kind) for kind in KVClassType]
    assert classes(TransferBackend.FAKE) == list(KVClassType)


def test_classes_when_banyan_is_off_then_all_are_sglangs(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert classes(TransferBackend.NIXL) == list(KVClassType)


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


def test_agent_when_it_is_made_on_a_cpu_then_its_progress_thread_pauses_and_later_agents_are_nixls_own():
    from nixl._api import nixl_agent, nixl_agent_config

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    native = bindings.nixlAgent
    pauses_us = []

    def spy(name, config):
        pauses_us.append(config.pthrDelay)
        return native(name, config)

    bindings.nixlAgent = spy
    try:
        with nixl.pausing_progress():
            nixl_agent("pausing", nixl_agent_config(backends=[]))
        nixl_agent("spinning", nixl_agent_config(backends=[]))
    finally:
        bindings.nixlAgent = native
    assert pauses_us == [nixl.PROGRESS_PAUSE_US, 0]
