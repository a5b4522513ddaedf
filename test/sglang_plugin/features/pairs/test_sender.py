# SPDX-License-Identifier: Apache-2.0
"""A prefill server whose requests end before their decode server has asked: SGLang's own senders, tables and queue."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import KVClassType
from test.sglang_plugin.features.pairs.test_hand_over import (  # noqa: F401
    DECODE,
    ROOM,
    asks,
    engine,
    failures,
    manager,
    sender_of,
)
from test.sglang_plugin.rank.hooked import hooked

from banyan.features.pairs.rank.sender import after_add


def times_out(manager):  # noqa: F811
    """SGLang has waited for long enough, as its scheduler sees it."""
    sender = sender_of(manager)
    manager.defer_decode_allocation, manager.bootstrap_timeout, sender.init_time = False, 300, 0.0
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="timed out"):
        sender.failure_exception()


def test_request_when_its_decode_server_asks_after_the_time_out_then_it_is_told(manager):  # noqa: F811
    times_out(manager)
    assert failures(manager) == []
    asks(manager)
    assert failures(manager) == [[DECODE]] and not manager.request_status


def test_request_when_a_part_of_its_decode_server_has_asked_before_the_time_out_then_it_is_told(manager):  # noqa: F811
    asks(manager, num_required=2)
    manager.request_status.pop(ROOM)
    times_out(manager)
    assert failures(manager) == [[DECODE]]


def test_request_when_all_have_been_told_why_it_has_failed_then_they_are_not_told_again(manager):  # noqa: F811
    sender = sender_of(manager)
    asks(manager)
    manager.conclude_failure(bootstrap_room=ROOM, failure_reason="the network")
    with pytest.raises(KVTransferError, match="the network"):
        sender.failure_exception()
    assert failures(manager) == [[DECODE]]


def test_request_when_the_one_before_it_in_its_room_has_failed_behind_its_last_chunk_then_it_is_served(
    manager,  # noqa: F811
    monkeypatch,
):
    sender = sender_of(manager)
    asks(manager)
    manager.conclude_failure(bootstrap_room=ROOM, failure_reason="the network")
    # As SGLang's worker does behind the last chunk.
    manager.transfer_infos.pop(ROOM)
    with pytest.raises(KVTransferError, match="the network"):
        sender.failure_exception()
    manager.told.clear()
    manager.sender_trace_module, manager.is_dummy_cp_rank = None, False
    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))
    kind = manager.engine_module.CLASSES[KVClassType.SENDER]
    kind(mgr=manager, bootstrap_addr="p:1", bootstrap_room=ROOM, req_has_disagg_prefill_dp_rank=False)
    asks(manager)
    assert manager.request_status[ROOM] == KVPoll.WaitingForInput and manager.told == []
    assert manager.rooms.is_claimed(ROOM)


def test_request_when_it_is_refused_after_a_part_of_its_decode_server_has_asked_then_that_is_told(manager):  # noqa: F811
    asks(manager, num_required=2)
    # SGLang says that a decode server has asked when all of it has.
    manager.request_status.pop(ROOM)
    queue = SimpleNamespace(kv_manager=manager)
    after_add(None, queue, SimpleNamespace(bootstrap_room=ROOM, disagg_kv_sender=None))
    assert failures(manager) == [[DECODE]]
    asks(manager, num_required=2)
    assert manager.request_status[ROOM] == KVPoll.Failed, "what asks then waits for nothing"


@pytest.mark.parametrize("fails", [True, False])
def test_room_when_its_sender_opens_it_then_it_is_claimed_before_that_and_not_where_that_fails(
    manager,  # noqa: F811
    monkeypatch,
    fails,
):
    opened = []

    def num_dp_ranks():
        opened.append((manager.request_status[ROOM], manager.rooms.is_claimed(ROOM)))
        if fails:
            raise RuntimeError("no group")
        return 1

    manager.sender_trace_module, manager.is_dummy_cp_rank = None, False
    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=num_dp_ranks()))
    kind = manager.engine_module.CLASSES[KVClassType.SENDER]
    with pytest.raises(RuntimeError, match="no group") if fails else nullcontext():
        kind(mgr=manager, bootstrap_addr="p:1", bootstrap_room=ROOM)
    assert opened == [(KVPoll.Bootstrapping, True)] and manager.rooms.is_claimed(ROOM) is not fails


@pytest.mark.parametrize("is_refused", [True, False])
def test_request_when_it_is_refused_before_it_has_a_sender_then_its_decode_server_is_told(manager, is_refused):  # noqa: F811
    req = SimpleNamespace(to_finish=None, finished_reason=None, bootstrap_room=ROOM, disagg_kv_sender=None)

    def create_sender(req, num_kv_heads):
        req.disagg_kv_sender = None if is_refused else sender_of(manager)
        return not is_refused

    add = hooked("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add", PrefillBootstrapQueue.add)
    add(SimpleNamespace(kv_manager=manager, create_sender=create_sender, queue=[]), req, 8)
    asks(manager)
    assert failures(manager) == [[DECODE]] * is_refused
