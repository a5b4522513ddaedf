# SPDX-License-Identifier: Apache-2.0
"""A prefill server that gives a request up tells its decode server, now or when it asks. SGLang's own methods on the
managers of both engines, without network and without the engine."""

import queue
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType
from test.sglang_plugin.rank.test_linker import PAGE, make_rank

from banyan._native import RankTable
from banyan.config import Config
from banyan.features.pairs.asked_rooms import AskedRooms
from banyan.features.pairs.rank import by_mooncake, by_nixl, hand_over
from banyan.features.pairs.roles import OTHER_WEIGHTS
from banyan.sglang_plugin.rank.reporting import report
from banyan.telemetry import Counters

ROOM = 11
DECODE = ("10.0.0.2", 4242)


@pytest.fixture(params=[by_nixl, by_mooncake], ids=["nixl", "mooncake"])
def engine(request):
    return request.param


@pytest.fixture
def manager(engine):
    """SGLang's tables, and a list of what decode servers were told."""
    kind = engine.CLASSES[KVClassType.MANAGER]
    made = kind.__new__(kind)
    made.engine_module = engine
    made.prepare()
    if engine is by_nixl:
        made.prepare_advances()
    made.request_status, made.transfer_infos, made.failure_records = {}, {}, {}
    made.req_to_decode_prefix_len = {}
    made.failure_lock = threading.Lock()
    made.deferred_bootstrap = None
    made._deferred_ack_targets, made._deferred_ack_poisoned_rooms, made._staging_outstanding = {}, set(), {}
    made.told = []
    made.send_kv_status_message = lambda **said: made.told.append(said)
    return made


def asks(manager, room=ROOM, *, num_required=1):
    """What SGLang's bootstrap thread does when a decode server has sent all that a transfer needs."""
    info = SimpleNamespace(
        room=room, endpoint=DECODE[0], dst_port=DECODE[1], is_dummy=False, required_dst_info_num=num_required
    )
    manager.transfer_infos[room] = {"agent:17": info}
    manager.update_status(room, KVPoll.WaitingForInput)


def sender_of(manager, room=ROOM):
    kind = manager.engine_module.CLASSES[KVClassType.SENDER]
    sender = kind.__new__(kind)
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


def test_abort_when_a_message_to_the_decode_server_waits_then_the_scheduler_does_not(manager, monkeypatch):
    del manager.send_kv_status_message
    reads, told = threading.Event(), queue.Queue()
    monkeypatch.setattr(
        conn.CommonKVManager, "send_kv_status_message", lambda self, **said: reads.wait(10) and told.put(said)
    )
    rooms = [ROOM, ROOM + 1]
    for room in rooms:
        sender = sender_of(manager, room)
        asks(manager, room)
        sender.abort()
    assert told.empty() and [manager.request_status[room] for room in rooms] == [KVPoll.Failed] * 2
    reads.set()
    assert [told.get(timeout=10)["bootstrap_room"] for _ in rooms] == rooms


def test_abort_when_a_decode_server_reads_no_acknowledgement_then_the_control_port_and_others_do_not_wait(
    manager, monkeypatch
):
    reads, told = threading.Event(), queue.Queue()

    def acknowledge(self, room, target):
        assert target.ip != DECODE[0] or reads.wait(10)
        told.put(target.ip)

    monkeypatch.setattr(conn.CommonKVManager, "_send_abort_ack", acknowledge)
    manager.enable_deferred_decode_kv_release = True
    for ip in (DECODE[0], "10.0.0.3"):
        notice = conn.AbortNotification(room=ROOM, decode_ip=ip, decode_port=DECODE[1], generation=1)
        assert manager._handle_abort_notification(notice.to_zmq())
    assert told.get(timeout=10) == "10.0.0.3"
    reads.set()
    assert told.get(timeout=10) == DECODE[0]


def test_abort_when_the_decode_server_has_not_asked_yet_then_it_is_told_when_it_asks(manager):
    sender = sender_of(manager)
    sender.abort()
    assert failures(manager) == []
    manager.request_status.pop(ROOM)
    manager.req_to_decode_prefix_len[ROOM] = 0
    asks(manager)
    assert failures(manager) == [[DECODE]]
    tables = (manager.request_status, manager.transfer_infos, manager.failure_records, manager.req_to_decode_prefix_len)
    assert not any(tables)


def test_abort_when_everything_was_sent_then_the_decode_server_keeps_it(manager):
    sender = sender_of(manager)
    asks(manager)
    manager.update_status(ROOM, KVPoll.Success)
    sender.abort()
    assert failures(manager) == []


def test_rooms_when_many_were_given_up_then_the_oldest_are_forgotten(manager):
    manager._given_up.most = 2
    for room in (1, 2, 3):
        sender_of(manager, room).abort()
    for room in (1, 2, 3):
        manager.request_status.pop(room)
        asks(manager, room)
    assert len(failures(manager)) == 2 and manager.request_status == {1: KVPoll.WaitingForInput}


def test_aborts_when_sglang_never_clears_their_rooms_then_no_table_grows_without_bound(manager):
    manager.rooms = AskedRooms(time.monotonic, max_rooms=3)
    for room in range(1, 10):
        sender = sender_of(manager, room)
        asks(manager, room)
        manager.req_to_decode_prefix_len[room] = 0
        sender.abort()
    assert len(failures(manager)) == 9
    tables = (manager.request_status, manager.transfer_infos, manager.failure_records, manager.req_to_decode_prefix_len)
    assert [list(table) for table in tables] == [[7, 8, 9]] * 4


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
    manager.attn_dp_rank = hand_over.rank_to_name(manager)
    told = []
    answer = SimpleNamespace(status_code=200)
    monkeypatch.setattr(conn.requests, "post", lambda url, json, timeout: told.append((url, json)) or answer)
    sender = sender_of(manager)
    sender.bootstrap_server_url = "p:1"
    sender._register_prefill_dp_rank()
    assert told == [("http://p:1/register_dp_rank", {"bootstrap_room": ROOM, "dp_rank": named})]


class Misfit:
    """SGLang's side of a prefill server with other pages."""

    def try_ensure_parallel_info(self, bootstrap_addr):
        raise RuntimeError("Page size mismatch")


def test_decode_server_when_a_prefill_server_does_not_fit_then_it_goes_on_and_says_so_once(caplog):
    manager = object.__new__(type("Manager", (hand_over.HandOver, Misfit), {}))
    manager.prepare()
    manager.prefill_info_table = {}
    assert not any(manager.try_ensure_parallel_info("there:1") for _ in range(3))
    assert caplog.text.count("Page size mismatch") == 1


def server(name, *, epoch=3, knows=True):
    """Whose pages have this name, as to weights; ``knows``: whether they are to have one."""
    full = SimpleNamespace(config=SimpleNamespace(knows_weights=knows))
    return SimpleNamespace(
        rank=SimpleNamespace(weights_name=name, weights_epoch=epoch, kinds=SimpleNamespace(full=full))
    )


@pytest.fixture
def be(monkeypatch):
    """From now on the process is of this server."""
    return lambda one: monkeypatch.setattr(hand_over.at_rank, "_at", one)


def asks_as(manager, be, decode):
    """What a decode server asks for a room with, in SGLang's words."""
    be(decode)
    manager.local_ip, manager.rank_port, manager.agent = *DECODE, SimpleNamespace(name="decode")
    manager.get_session_id = lambda: "10.0.0.2:17"
    return manager.build_receiver_metadata_message(
        bootstrap_room=ROOM,
        required_dst_info_num=1,
        kv_indices=np.arange(3, dtype=np.int32),
        aux_index=0,
        state_indices=None,
        decode_prefix_len=0,
        is_dummy=False,
    )


def hears(manager, why, *, room=ROOM):
    """What a decode server's thread does with a prefill server's message that a room has failed."""
    manager.apply_prefill_status(bootstrap_room=room, status=KVPoll.Failed, prefill_rank=0, failure_reason=why)


@pytest.fixture
def meet(manager, be):
    """A decode server asks a prefill server for a room."""
    manager.decode_kv_args_table = dict.fromkeys(["decode", "10.0.0.2:17"])
    manager.enable_staging = False

    def ask(decode, prefill):
        message = asks_as(manager, be, decode)
        be(prefill)
        assert not manager._is_foreign(message)
        asks(manager)

    return ask


@pytest.mark.parametrize(
    ("decode", "prefill", "fails"),
    [
        (server("a"), server("b"), True),
        (server("a"), server("a"), False),
        (server("a"), server(""), True),
        (server("a"), server("", knows=False), False),
        (server(""), server("b"), False),
        (None, server("b"), False),
        (server("a"), None, False),
    ],
    ids=["other", "equal", "changed", "needs no name", "decode changed", "decode off", "prefill off"],
)
def test_room_when_the_prefill_server_has_other_weights_then_it_fails_and_the_decode_server_hears_why(
    manager, meet, decode, prefill, fails
):
    sender_of(manager)
    meet(decode, prefill)
    assert failures(manager) == ([[DECODE]] if fails else [])
    assert (manager.failure_records.get(ROOM) == OTHER_WEIGHTS) is fails
    assert (manager.request_status[ROOM] == KVPoll.Failed) is fails


def test_room_when_another_shard_has_given_it_up_for_the_weights_then_the_decode_server_s_shard_hears_why(
    manager, meet
):
    """It names its weights again else."""
    with pytest.raises(conn.KVTransferError):
        sender_of(manager).failure_exception()
    meet(server("a"), server("b"))
    assert [said["failure_reason"] for said in manager.told if said["targets"]] == [OTHER_WEIGHTS]


def test_room_when_its_request_comes_after_it_has_failed_then_that_fails_too(manager, meet):
    meet(server("a"), server("b"))
    sender_of(manager)
    assert manager.request_status[ROOM] == KVPoll.Failed and failures(manager) == [[DECODE]]


@pytest.mark.parametrize("now", [server("b", epoch=4), server("a", epoch=5)], ids=["others", "the same again"])
def test_room_when_the_prefill_server_s_weights_change_before_all_is_sent_then_it_fails(manager, meet, be, now):
    manager.transfer_queues = [queue.Queue()]
    sender_of(manager)
    meet(server("a"), server("a"))
    be(now)
    manager.add_transfer_request(ROOM, [4], slice(0, 1), True)
    assert manager.transfer_queues[0].empty()
    assert failures(manager) == [[DECODE]] and manager.failure_records[ROOM] == OTHER_WEIGHTS
    manager.over(ROOM)
    assert not manager._epochs


@pytest.mark.parametrize("fails", ["leave", "wait_for_copies"])
def test_room_when_the_prefill_server_cannot_leave_the_pages_of_its_old_weights_then_it_fails_all_the_same(
    manager, meet, monkeypatch, fails
):
    """SGLang computes with the new ones by then."""
    prefill, *_ = make_rank(monkeypatch, RankTable.create(2), 0, Config(min_fetch_tokens=PAGE, host_gb=0.0))
    manager.transfer_queues = [queue.Queue()]
    sender_of(manager)
    meet(server("a"), SimpleNamespace(rank=prefill))
    assert not failures(manager)
    owner = prefill.kinds if fails == "leave" else prefill.kinds.full.access
    monkeypatch.setattr(owner, fails, Mock(side_effect=RuntimeError("a peer does not stop reading")))
    with pytest.raises(RuntimeError):
        prefill.weights_changed()
    manager.add_transfer_request(ROOM, [4], slice(0, 1), True)
    assert manager.transfer_queues[0].empty()
    assert failures(manager) == [[DECODE]] and manager.failure_records[ROOM] == OTHER_WEIGHTS


def test_decode_server_when_the_prefill_server_has_other_weights_then_it_keeps_nothing_and_is_served(manager, be):
    """It would fail for ever: equal weights lie in memory in other ways where the two divide them in other ways."""
    held_back = []
    decode = server("a")
    decode.rank.hold_back = held_back.append
    asks_as(manager, be, decode)
    manager.update_status(ROOM, KVPoll.Bootstrapping)
    hears(manager, "the network")
    assert not held_back
    hears(manager, OTHER_WEIGHTS)
    assert held_back == [OTHER_WEIGHTS] and manager.failure_records[ROOM] == OTHER_WEIGHTS


def test_decode_server_when_another_shard_has_heard_of_other_weights_before_then_this_one_keeps_nothing_either(
    manager, be
):
    held_back = []
    decode = server("a")
    decode.rank.hold_back = held_back.append
    asks_as(manager, be, decode)
    hears(manager, OTHER_WEIGHTS, room=ROOM + 1)
    assert not held_back, "of a room that it has not asked for"
    hears(manager, OTHER_WEIGHTS)
    assert held_back == [OTHER_WEIGHTS] and not manager.failure_records


def test_reason_when_a_room_has_failed_then_sglang_s_decode_servers_read_it(manager):
    manager._prefill_unique_rank = lambda: 0
    said = manager._encode_kv_status_message(bootstrap_room=ROOM, status=KVPoll.Failed, failure_reason=OTHER_WEIGHTS)
    assert manager.parse_kv_status_message(said) == (ROOM, KVPoll.Failed, 0, OTHER_WEIGHTS)
