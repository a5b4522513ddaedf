# SPDX-License-Identifier: Apache-2.0
"""A prefill server that gives a request up tells its decode server, now or when it asks. SGLang's own methods on the
managers of both engines, without network and without the engine."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType

from banyan.features.pairs.asked_rooms import AskedRooms
from banyan.features.pairs.rank import by_mooncake, by_nixl, hand_over
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
    made.failure_lock = threading.Lock()
    made.deferred_bootstrap = None
    made._deferred_ack_targets, made._deferred_ack_poisoned_rooms, made._staging_outstanding = {}, set(), {}
    made.told = []
    made.send_kv_status_message = lambda **said: made.told.append(said)
    return made


def asks(manager, room=ROOM):
    """What SGLang's bootstrap thread does when a decode server has sent all that a transfer needs."""
    info = SimpleNamespace(room=room, endpoint=DECODE[0], dst_port=DECODE[1], is_dummy=False)
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


def test_rooms_when_many_were_given_up_then_the_oldest_are_forgotten(manager):
    manager._given_up.most = 2
    for room in (1, 2, 3):
        sender_of(manager, room).abort()
    for room in (1, 2, 3):
        manager.request_status.pop(room)
        asks(manager, room)
    assert len(failures(manager)) == 2 and manager.request_status == {1: KVPoll.WaitingForInput}


def test_aborts_when_sglang_never_clears_their_rooms_then_no_table_grows_without_bound(manager):
    manager.req_to_decode_prefix_len = {}
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
    assert not any(manager.try_ensure_parallel_info("there:1") for _ in range(3))
    assert caplog.text.count("Page size mismatch") == 1


def test_sender_when_its_decode_server_was_not_taken_in_then_its_chunks_have_no_bound():
    sender = object.__new__(by_nixl.NixlSender)
    sender.bootstrap_room = ROOM
    asked = {ROOM: {"not taken in": SimpleNamespace(is_dummy=False)}}
    sender.kv_mgr = SimpleNamespace(_dcp_pack_max_tokens=5, transfer_infos=asked, decode_kv_args_table={})
    assert sender.get_max_transfer_tokens() is None


class Bootstrap:
    """What a prefill server tells, and a decode server of the same kind hears of it."""

    def __init__(self, monkeypatch, manager, *, layout=None):
        self.manager, self.told = manager, None
        manager.kv_layout, manager.prefill_info_table = layout, {}
        monkeypatch.setattr(
            conn.CommonKVManager, "register_to_bootstrap", lambda manager: self._hear(manager.kv_layout)
        )
        self._patch = monkeypatch

    def _hear(self, layout):
        self.told = layout
        self.manager.prefill_info_table["10.0.0.1:8998"] = SimpleNamespace(kv_layout=layout)

    def be(self, weights):
        """From now on the manager is of a server that has loaded these."""
        self._patch.setattr(hand_over.at_rank, "loaded_weights", lambda: weights)


@pytest.mark.parametrize(
    ("prefill", "decode", "layout", "fails"),
    [
        ("a", "b", None, True),
        ("a", "a", None, False),
        ("", "b", None, False),
        ("a", "", None, False),
        ("a", "b", "one of two layouts", False),
    ],
    ids=["different", "equal", "not told", "not known here", "the pool's layout is told"],
)
def test_request_when_the_prefill_server_has_other_weights_then_it_fails_with_the_reason_and_nothing_is_taken(
    monkeypatch, manager, prefill, decode, layout, fails
):
    bootstrap = Bootstrap(monkeypatch, manager, layout=layout)
    bootstrap.be(prefill)
    manager.register_to_bootstrap()
    bootstrap.be(decode)
    kind, begun = manager.engine_module.CLASSES[KVClassType.RECEIVER], []
    monkeypatch.setattr(conn.CommonKVReceiver, "init", lambda receiver, rank: begun.append(rank))
    receiver = kind.__new__(kind)
    receiver.kv_mgr, receiver.bootstrap_addr, receiver.bootstrap_room = manager, "10.0.0.1:8998", ROOM
    receiver.conclude_state = None
    manager.update_status(ROOM, KVPoll.Bootstrapping)
    receiver.init(3)
    assert begun == ([] if fails else [3])
    assert (receiver.conclude_state == KVPoll.Failed) is fails
    assert ("other weights" in manager.failure_records.get(ROOM, "")) is fails
    assert layout is None or bootstrap.told == layout
