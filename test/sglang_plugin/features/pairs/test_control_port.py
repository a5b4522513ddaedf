# SPDX-License-Identifier: Apache-2.0
"""A prefill server's control socket under messages that no decode server sends: SGLang's own thread behind a real
socket, with Banyan's screen before it and without."""

import queue
import random
import threading
import time
import tracemalloc
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.utils import pack_int_lists
from sglang.srt.disaggregation.mooncake import conn as of_mooncake
from sglang.srt.disaggregation.nixl.conn import GUARD, KVArgsRegisterInfo, NixlKVManager, TransferInfo
from test.sglang_plugin.features.pairs.hand_over_rig import AGENT, ENDPOINT, SlowAgent, make_manager

from banyan.features.pairs.asked_rooms import AskedRooms
from banyan.features.pairs.rank import by_mooncake, by_nixl, hand_over
from banyan.features.pairs.rank.control_port import MAX_LISTS_BYTES, MAX_PEERS, REGISTRATION
from banyan.sglang_plugin.rank.reporting import report
from banyan.telemetry import Counters

# SGLang's thread ends by an exception, here at the test's end.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

NUM_FOREIGN = 1000


def asking(room):
    """As ``NixlKVManager.build_receiver_metadata_message``."""
    pages = np.arange(3, dtype=np.int32).tobytes()
    return [GUARD, b"%d" % room, b"10.0.0.2", b"4242", AGENT.encode(), pages, b"0", b"1", b"", b"0", b"0"]


def foreign(rng):
    kinds = (
        [rng.randbytes(rng.randrange(1, 200))],
        [b"GET / HTTP/1.1", b"Host: here"],
        [b""],
        [GUARD],
        [GUARD, b"seven"],
        [GUARD, b"None", b"too", b"short"],
        [GUARD, *(rng.randbytes(8) for _ in range(12))],
        asking(9)[: rng.randrange(1, 8)],
        [*asking(9)[:5], b"odd", *asking(9)[6:]],
        [b"WATERMARK", b"1"],
    )
    return rng.choice(kinds)


class Ending:
    """A socket whose reader ends with the test: SGLang's thread is no daemon."""

    def __init__(self, socket):
        self._socket = socket
        self.has_ended = threading.Event()

    def recv_multipart(self):
        while not self._socket.poll(50):
            if self.has_ended.is_set():
                raise SystemExit
        return self._socket.recv_multipart()


@pytest.fixture
def fallen(monkeypatch):
    """Exceptions that have ended threads."""
    ended = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", lambda said: ended.put(said.exc_value))
    return ended


@pytest.fixture
def port():
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    ending = Ending(pull)
    yield SimpleNamespace(socket=ending, send=push.send_multipart)
    ending.has_ended.set()
    time.sleep(0.1)
    context.destroy(linger=0)


def is_asked_within(manager, room, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while manager.request_status.get(room) != KVPoll.WaitingForInput:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def test_socket_when_a_thousand_foreign_messages_come_then_the_next_decode_server_is_heard(port, monkeypatch):
    counters = Counters()
    linker = SimpleNamespace(counters=counters)
    monkeypatch.setattr(report, "_linker", lambda: linker)
    manager = make_manager(SlowAgent(1))
    manager.server_socket = port.socket
    manager._start_bootstrap_thread()
    rng = random.Random(5)
    for number in range(NUM_FOREIGN):
        port.send(foreign(rng))
        if number % 100 == 0:
            port.send(asking(number + 10))
            assert is_asked_within(manager, number + 10, 10)
    port.send(asking(7))
    assert is_asked_within(manager, 7, 10)
    assert counters.foreign_hand_over_messages == NUM_FOREIGN
    assert 9 not in manager.request_status


def test_socket_when_it_is_sglangs_alone_then_one_foreign_message_ends_it(port, fallen):
    """When this fails, SGLang has learnt it, and the screen can go."""
    manager = make_manager(SlowAgent(1))
    manager.server_socket = port.socket
    NixlKVManager._start_bootstrap_thread(manager)
    port.send(asking(6))
    assert is_asked_within(manager, 6, 10)
    port.send([b"GET / HTTP/1.1"])
    assert fallen.get(timeout=10)


def test_peer_when_its_pool_does_not_fit_then_it_is_not_taken_in_and_the_thread_goes_on(monkeypatch):
    manager = make_manager(SlowAgent(1))
    misfit = SimpleNamespace(agent_name="misfit", endpoint="10.0.0.3", dst_port=4242)

    def refuse(self, peer):
        self.decode_kv_args_table[peer.agent_name] = peer
        raise ValueError("fewer regions")

    monkeypatch.setattr(NixlKVManager, "_add_remote_peer", refuse)
    abort = [b"ABORT", b"7", b"10.0.0.3", b"4242", b"1"]
    assert manager._is_foreign(abort)
    manager._add_remote_peer(misfit)
    assert "misfit" not in manager.decode_kv_args_table
    assert not manager._is_foreign(abort), "its rooms fail, and it keeps their pages until that is acknowledged"


STAGING = {b"WATERMARK": [b"1", b"4096"], b"STAGING_RSP": [b"7", b"3", b"0", b"0", b"4096"]}


@pytest.mark.parametrize("tag", STAGING)
@pytest.mark.parametrize("stages", [True, False])
def test_message_when_it_is_of_staging_then_it_is_foreign_only_where_staging_is_off(stages, tag):
    for manager in (make_manager(SlowAgent(1)), of_mooncakes()):
        manager.enable_staging = stages
        manager.decode_kv_args_table = {AGENT: None}
        assert manager._is_foreign([tag, *STAGING[tag], AGENT.encode()]) is not stages


@pytest.mark.parametrize(
    "message",
    [
        *([b"WATERMARK"], [b"WATERMARK", b"1"], [b"WATERMARK", b"1", b"one", AGENT.encode()], [b"STAGING_RSP"]),
        [b"WATERMARK", b"1", b"4096", b"nobody's"],
        [b"WATERMARK", b"1", b"4096", b"\xff"],
        *([b"STAGING_RSP", b"7", chunk, b"0", b"0", b"1", AGENT.encode()] for chunk in (b"-5", b"1000000000", b"")),
    ],
)
def test_message_of_staging_when_no_decode_server_sends_it_so_then_it_is_foreign(message):
    for manager in (make_manager(SlowAgent(1)), of_mooncakes()):
        manager.enable_staging = True
        manager.decode_kv_args_table = {AGENT: None}
        assert manager._is_foreign(message)


@pytest.mark.parametrize(("deferred", "foreign"), [(object(), False), (None, True)])
def test_message_when_it_is_of_a_deferred_allocation_then_it_is_foreign_only_where_there_is_none(deferred, foreign):
    manager = of_mooncakes()
    manager.deferred_bootstrap = deferred
    assert manager._is_foreign([b"BOOTSTRAP", b"7", b"10.0.0.2", b"4242"]) is foreign


@pytest.mark.parametrize(
    ("address", "foreign"),
    [((), False), (ENDPOINT, False), (("10.0.0.2", 4243), True), (("10.6.6.6", 4242), True)],
    ids=["none", "a decode server's", "another port", "another host"],
)
def test_abort_when_it_wants_an_answer_elsewhere_than_at_a_decode_server_then_it_is_foreign(address, foreign):
    abort = [b"ABORT", b"7", *(str(part).encode() for part in address)]
    assert make_manager(SlowAgent(1))._is_foreign(abort) is foreign
    manager = of_mooncakes()
    assert manager._is_foreign(abort) is bool(address)
    manager.decode_kv_args_table["10.0.0.2:1"] = SimpleNamespace(endpoint=ENDPOINT[0], dst_port=ENDPOINT[1])
    assert manager._is_foreign(abort) is foreign


def test_abort_when_it_names_no_room_then_it_is_foreign():
    assert make_manager(SlowAgent(1))._is_foreign([b"ABORT", b"seven"])


def registration(name):
    """As ``NixlKVManager.build_receiver_registration_message``, as far as it is read before the pool."""
    numbers = [b"0", b"1", b"0", b"64"]
    return [GUARD, b"None", b"10.0.0.2", b"4242", name, b"metadata", b"", b"", b"", *numbers]


def test_rooms_when_nobody_comes_to_them_then_the_oldest_are_forgotten_and_those_of_requests_stay():
    manager = make_manager(SlowAgent(1))
    manager.rooms = AskedRooms(time.monotonic, max_rooms=10)
    manager.rooms.claim(5)
    for room in range(100):
        assert not manager._is_foreign(asking(room))
        manager.transfer_infos[room] = {AGENT: None}
        manager.request_status[room] = KVPoll.WaitingForInput
    left = [5, *range(90, 100)]
    assert sorted(manager.transfer_infos) == sorted(manager.request_status) == left


def test_room_when_as_many_have_asked_for_it_as_it_needs_then_any_other_is_foreign():
    for manager, asks in ((make_manager(SlowAgent(1)), asking), (of_mooncakes(), asking_by_mooncake)):
        manager.decode_kv_args_table.setdefault(SESSION.decode(), None)
        info = SimpleNamespace(required_dst_info_num=2)
        manager.transfer_infos[3] = {"one": info}
        assert not manager._is_foreign(asks(3))
        manager.transfer_infos[3] = {"one": info, "another": info}
        assert manager._is_foreign(asks(3)) and not manager._is_foreign(asks(4))


def test_room_when_it_has_a_request_and_is_asked_for_by_too_many_bytes_then_the_message_is_foreign():
    manager = make_manager(SlowAgent(1))
    manager.rooms = AskedRooms(time.monotonic, max_claimed_bytes=sum(map(len, asking(3))) + 1)
    for room in (3, 4):
        manager.rooms.claim(room)
    assert not manager._is_foreign(asking(3)) and manager._is_foreign(asking(4)) and not manager._is_foreign(asking(5))


@pytest.mark.parametrize(
    "of_engine",
    [lambda: (make_manager(SlowAgent(1)), asking, 8), lambda: (of_mooncakes(), asking_by_mooncake, 6)],
    ids=["nixl", "mooncake"],
)
def test_room_when_it_is_asked_for_by_lists_then_they_are_bounded_and_counted_as_what_they_become(of_engine):
    """Four bytes make a list: a frame of megabytes makes millions."""
    manager, asks, place = of_engine()
    manager.decode_kv_args_table.setdefault(SESSION.decode(), None)
    message = asks(6)
    message[place] = pack_int_lists([[]] * (1 << 16), "i")
    tracemalloc.start()
    said = manager.messages.read(message)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(said.dst_state_indices) == 1 << 16
    assert not manager._is_foreign(message)
    manager.rooms = AskedRooms(time.monotonic, max_claimed_bytes=num_bytes)
    manager.rooms.claim(6)
    assert manager._is_foreign(message)
    message = asks(7)
    message[place] = bytes(MAX_LISTS_BYTES + 1)
    assert manager._is_foreign(message)


def test_peers_when_more_say_where_their_pools_lie_than_there_are_then_the_next_is_not_taken_in(monkeypatch, caplog):
    manager = make_manager(SlowAgent(1))
    taken = []
    monkeypatch.setattr(NixlKVManager, "_add_remote_peer", lambda self, peer: taken.append(peer.agent_name))
    manager.decode_kv_args_table = dict.fromkeys(map(str, range(MAX_PEERS)))
    for name in ("new", "newer", "7"):
        manager._add_remote_peer(SimpleNamespace(agent_name=name, endpoint="10.0.0.3", dst_port=4242))
    assert taken == ["7"] and manager._refused == {("10.0.0.3", 4242)}
    assert len([line for line in caplog.messages if "--banyan-secret-file" in line]) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {1: b"9" * 4000},
        {1: b"-1"},
        {3: b"0"},
        {3: b"70000"},
        {4: b"n" * 300},
        {7: b"0"},
        {7: b"9" * 30},
        {9: b"-16"},
        {9: b"9" * 10},
    ],
)
def test_message_when_its_numbers_are_those_of_no_decode_server_then_it_is_foreign(changed):
    manager = make_manager(SlowAgent(1))
    message = [changed.get(place, part) for place, part in enumerate(asking(9))]
    assert manager._is_foreign(message)
    assert manager._is_foreign([*asking(9), *[b""] * 100])


def num_waiting(manager):
    """Rooms that wait for their request."""
    return len(manager.rooms._waiting.since_s)


def mutated(draw_message, place, part):
    message = list(draw_message)
    message[place % len(message)] = part
    return message


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=30).map(lambda parts: [GUARD, *parts])
    | st.lists(st.binary(max_size=40), min_size=1)
    | st.builds(
        mutated,
        st.sampled_from([asking(9), registration(b"decode")]),
        st.integers(0, 20),
        st.binary(max_size=40) | st.from_regex(rb"\A-?[0-9]{1,40}\Z"),
    )
)
def test_message_when_it_is_anything_then_it_is_foreign_or_sglang_reads_it_and_a_room_is_kept_at_most(message):
    manager = make_manager(SlowAgent(1))
    manager.rooms = AskedRooms(time.monotonic, max_rooms=2)
    if manager._is_foreign(message) or message[0] != GUARD:
        assert num_waiting(manager) == 0
    elif message[1] == REGISTRATION:
        assert KVArgsRegisterInfo.from_zmq(message[1:]).agent_name == message[4].decode()
    else:
        assert TransferInfo.from_zmq(message[1:]).room == int(message[1])
        assert num_waiting(manager) == 1


SESSION = b"10.0.0.2:16000"


def of_mooncakes():
    """A manager of Mooncake's behind its construction, as far as its control port goes."""
    made = by_mooncake.MooncakeHandOver.__new__(by_mooncake.MooncakeHandOver)
    made.prepare()
    made.deferred_bootstrap, made.enable_staging, made._stopped = None, False, False
    made.dcp_size, made.dcp_rank, made.is_mla_backend, made.is_hybrid_mla_backend = 1, 0, True, False
    made.request_status, made.transfer_infos, made.failure_records = {}, {}, {}
    made.req_to_decode_prefix_len, made.decode_kv_args_table = {}, {}
    made._deferred_ack_targets, made._deferred_ack_poisoned_rooms, made._staging_outstanding = {}, set(), {}
    made.server_args, made._worker_threads = SimpleNamespace(enable_pd_role_switch=False), []
    made.kv_args = SimpleNamespace(state_types=[], aux_data_ptrs=[])
    made.session_lock, made.failed_sessions, made.session_failures = threading.Lock(), set(), {}
    made.failed_session_probes, made.state_layout_rejections, made.state_strides_validated = {}, {}, set()
    return made


def asking_by_mooncake(room, session=SESSION):
    """As ``MooncakeKVManager.build_receiver_metadata_message``."""
    pages = np.arange(3, dtype=np.int32).tobytes()
    return [b"%d" % room, b"10.0.0.2", b"4242", session, pages, b"0", b"", b"1", b"0", b""]


def registration_by_mooncake(session=SESSION, *, dcp_size=b"1"):
    """As ``MooncakeKVManager.build_receiver_registration_message``."""
    parts = [b"None", b"10.0.0.2", b"4242", session, b"\0" * 8, b"", b"", b"0", b"1", b"64", b"", b"", b"", b""]
    return [*parts, b"", b"", dcp_size, b"0", b"", b""]


def test_socket_of_mooncake_when_foreign_messages_come_then_the_next_decode_server_is_heard(port, monkeypatch):
    counters = Counters()
    monkeypatch.setattr(report, "_linker", lambda: SimpleNamespace(counters=counters))
    monkeypatch.setattr(of_mooncake, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    manager = of_mooncakes()
    manager.server_socket = port.socket
    manager.start_prefill_thread()
    port.send(registration_by_mooncake())
    for message in (
        *([b"GET / HTTP/1.1"], [b""], [b"7"], [b"None", b"too", b"short"], [b"STAGING_RSP"]),
        asking_by_mooncake(6, b"no-port"),
        asking_by_mooncake(6, b"10.0.0.9:1"),
        registration_by_mooncake(b"10.0.0.8:1", dcp_size=b"2"),
    ):
        port.send(message)
    port.send(asking_by_mooncake(7))
    assert is_asked_within(manager, 7, 10)
    assert counters.foreign_hand_over_messages == 8 and list(manager.transfer_infos) == [7]
    assert list(manager.decode_kv_args_table) == [SESSION.decode()]


def nixl_port():
    return make_manager(SlowAgent(1)), asking, NixlKVManager._start_bootstrap_thread


def mooncake_port():
    manager = of_mooncakes()
    manager.decode_kv_args_table[SESSION.decode()] = None
    return manager, asking_by_mooncake, of_mooncake.MooncakeKVManager.start_prefill_thread


@pytest.mark.parametrize("of_engine", [nixl_port, mooncake_port])
def test_thread_when_a_request_ends_while_its_decode_server_asks_for_its_room_then_it_goes_on(port, of_engine):
    manager, asks, start = of_engine()
    sender = object.__new__(by_nixl.NixlSender)
    sender.kv_mgr, sender.bootstrap_room, sender.conclude_state = manager, 6, KVPoll.Failed
    ending = threading.Thread(target=sender.clear)

    class Looked(dict):
        def __setitem__(self, room, infos):
            super().__setitem__(room, infos)
            if room == 6:
                ending.start()
                ending.join(0.2)

    manager.transfer_infos = Looked()
    manager.server_socket = port.socket
    manager.screen()
    start(manager)
    port.send(asks(6))
    port.send(asks(7))
    assert is_asked_within(manager, 7, 10)
    ending.join(10)
    assert list(manager.transfer_infos) == list(manager.request_status) == [7]


def is_heeding(manager):
    """Whether anybody else would have to wait."""
    seen = []
    look = threading.Thread(target=lambda: seen.append(manager._heeding.acquire(blocking=False)))
    look.start()
    look.join(10)
    return not seen[0]


def test_rooms_when_sglangs_thread_heeds_a_registration_then_nobody_waits_for_it():
    manager = make_manager(SlowAgent(1))
    messages = iter([asking(6), [b"ABORT", b"6"], registration(b"decode")])
    manager.server_socket = SimpleNamespace(recv_multipart=lambda: next(messages))
    manager.screen()
    held = []
    for _ in range(3):
        manager.server_socket.recv_multipart()
        held.append(is_heeding(manager))
    assert held == [True, True, False]


def test_rooms_when_sglangs_thread_has_ended_then_nobody_waits_for_it_for_long(monkeypatch):
    monkeypatch.setattr(hand_over, "HEEDED_S", 0.01)
    manager = make_manager(SlowAgent(1))
    ended = threading.Thread(target=manager._heeding.acquire)
    ended.start()
    ended.join(10)
    manager.request_status[6] = KVPoll.Failed
    manager._forget_room(6)
    assert manager.request_status == {}


def test_peers_of_mooncake_when_there_are_too_many_then_the_next_is_not_taken_in():
    manager = of_mooncakes()
    manager.decode_kv_args_table = dict.fromkeys(map(str, range(MAX_PEERS)))
    for port in range(1, 2 * MAX_PEERS):
        said = manager._publish_peer_registration("new:1", SimpleNamespace(endpoint="10.0.0.3", dst_port=port))
        assert said is not None and "new:1" not in manager.decode_kv_args_table
    assert len(manager._refused) == MAX_PEERS, "each may be told by a socket of its own"


def nixl_that_refuses(monkeypatch):
    manager = make_manager(SlowAgent(1))
    manager.decode_kv_args_table.clear()
    monkeypatch.setattr(NixlKVManager, "_add_remote_peer", Mock(side_effect=ValueError("fewer regions")))
    assert not manager._is_foreign(registration(AGENT.encode()))
    manager._add_remote_peer(KVArgsRegisterInfo.from_zmq(registration(AGENT.encode())[1:]))
    return manager, asking


def mooncake_that_refuses(monkeypatch):
    manager = of_mooncakes()
    assert manager._is_foreign(registration_by_mooncake(dcp_size=b"2"))
    return manager, asking_by_mooncake


@pytest.mark.parametrize("of_engine", [nixl_that_refuses, mooncake_that_refuses])
@pytest.mark.parametrize("comes_first", [True, False], ids=["after its request", "before its request"])
def test_room_when_its_decode_server_was_not_taken_in_then_it_fails_on_both_sides(monkeypatch, comes_first, of_engine):
    manager, asks = of_engine(monkeypatch)
    told = []
    manager.failure_lock = threading.Lock()
    manager.send_kv_status_message = lambda **said: told.append(said)
    if comes_first:
        manager.update_status(7, KVPoll.Bootstrapping)
    assert manager._is_foreign(asks(7))
    manager.update_status(7, KVPoll.Bootstrapping)
    assert manager.request_status[7] == KVPoll.Failed and not manager.transfer_infos
    assert [(said["targets"], said["bootstrap_room"], said["status"]) for said in told] == [
        ([ENDPOINT], 7, KVPoll.Failed)
    ]
    assert not manager._is_foreign([b"ABORT", b"7", b"10.0.0.2", b"4242", b"1"])


def test_rooms_of_mooncake_when_decode_servers_that_were_not_taken_in_ask_for_many_then_the_oldest_are_forgotten():
    manager = of_mooncakes()
    manager.failure_lock = threading.Lock()
    manager.send_kv_status_message = lambda **said: None
    manager.rooms = AskedRooms(time.monotonic, max_rooms=3)
    manager._is_foreign(registration_by_mooncake(dcp_size=b"2"))
    for room in range(10):
        manager._is_foreign(asking_by_mooncake(room))
    assert list(manager.request_status) == list(manager.failure_records) == [7, 8, 9]


def test_decode_server_when_it_has_fewer_layers_then_its_transfer_fails_and_the_thread_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(of_mooncake, "get_memory", lambda: SimpleNamespace(enable_unified_memory=False))
    manager = of_mooncakes()
    manager.enable_custom_mem_pool, manager.is_mla_backend, manager.pp_size = False, True, 1
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[1, 2, 3], kv_item_lens=[8, 8, 8], kv_layer_ids=[0, 1, 2], mla_compression_ratios=None,
        prefill_start_layer=0, prefill_end_layer=3, page_size=1, num_draft_entries=0,
    )  # fmt: skip
    pages = np.arange(2, dtype=np.int32)
    manager._validate_envelope_kv_layout = lambda *_: None
    assert manager.send_kvcache("10.0.0.2:1", pages, [1], pages, None, dst_layer_ids=[0]) == by_mooncake.FAILED
    assert "nothing can be sent to 10.0.0.2:1" in caplog.text


def test_worker_of_mooncake_when_a_room_goes_while_it_is_looked_up_then_it_goes_on():
    class Going(dict):
        def __contains__(self, room):
            return self.pop(room, None) is not None

    manager, chunks = of_mooncakes(), queue.Queue()
    manager.request_status = Going({6: KVPoll.WaitingForInput})
    manager._staging_outstanding = defaultdict(int)
    manager.enable_trace, manager.enable_deferred_decode_kv_release = False, True
    chunks.put(
        SimpleNamespace(room=6, staging_counted=False, wait_event=None, indices_event=None, prefill_kv_indices=())
    )
    chunks.put(None)
    manager.transfer_worker(chunks, None)
    assert not manager._staging_outstanding


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=30))
def test_message_when_it_is_anything_then_no_reading_raises(parts):
    for messages in (by_nixl.MESSAGES, by_mooncake.MESSAGES):
        messages.read([*messages.guard, *parts])
        messages.read([*messages.guard, REGISTRATION, *parts])
        messages.read([*messages.guard, b"7", *parts])
