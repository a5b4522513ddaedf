# SPDX-License-Identifier: Apache-2.0
"""A prefill server that gives a request up tells its decode server, now or when it asks. SGLang's own methods on a
manager without network and NIXL."""

import threading
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.disagg import kv_classes, nixl
from banyan.sglang_plugin.rank.disagg.decode import after_process_decode_queue

ROOM = 11
DECODE = ("10.0.0.2", 4242)


@pytest.fixture
def manager():
    """SGLang's tables, and a list of what decode servers were told."""
    made = nixl.BanyanNixl.__new__(nixl.BanyanNixl)
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


def classes(backend):
    return [kv_classes.around_get_kv_class(lambda *asked: asked[1], backend, kind) for kind in KVClassType]


def test_classes_when_the_backend_is_nixl_then_manager_and_sender_are_banyans(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: object())
    mine = {KVClassType.MANAGER: nixl.BanyanNixl, KVClassType.SENDER: nixl.BanyanKVSender}
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
    collected = []
    tree = SimpleNamespace(check_hicache_events=lambda: collected.append(True))
    after_process_decode_queue(None, SimpleNamespace(tree_cache=tree))
    assert len(collected) == is_sharing
