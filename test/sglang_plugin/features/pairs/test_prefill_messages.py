# SPDX-License-Identifier: Apache-2.0
"""A decode server's control socket under messages that no prefill server sends: SGLang's own threads of both engines
behind a real socket, with Banyan's screen before them and without."""

import ctypes
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from test.sglang_plugin.features.pairs.test_control_port import fallen, port  # noqa: F401

from banyan.features.pairs.rank import by_mooncake, by_nixl
from banyan.features.pairs.rank.prefill_messages import is_of_prefill_server
from banyan.sglang_plugin.rank.reporting import report
from banyan.telemetry import Counters

# SGLang's thread ends by an exception, here at the test's end.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ROOM, ITEM_BYTES, NUM_ITEMS = 7, 16, 4


@pytest.fixture(params=[by_nixl.NixlHandOver, by_mooncake.MooncakeHandOver], ids=["nixl", "mooncake"])
def manager(request, monkeypatch):
    monkeypatch.setattr(CommonKVManager, "_start_heartbeat_checker_thread", lambda self: None)
    return of_a_decode_server(request.param)


def of_a_decode_server(kind):
    """A manager behind its construction, with one buffer of metadata between two others' bytes."""
    made = kind.__new__(kind)
    made.prepare()
    made._stopped, made.deferred_bootstrap, made.defer_decode_allocation = False, None, False
    made.enable_staging, made._staging_handler, made.enable_deferred_decode_kv_release = False, None, True
    made.server_args, made._worker_threads = SimpleNamespace(enable_pd_role_switch=False), []
    made.request_status, made.failure_records = {ROOM: KVPoll.WaitingForInput}, {}
    made.prefill_response_tracker, made.required_prefill_response_num_table = {ROOM: set()}, {ROOM: 1}
    made._deferred_abort_ack_tracker = {}
    made.memory = ctypes.create_string_buffer(3 * NUM_ITEMS * ITEM_BYTES)
    buffer_bytes = NUM_ITEMS * ITEM_BYTES
    made.kv_args = SimpleNamespace(
        aux_data_ptrs=[ctypes.addressof(made.memory) + buffer_bytes],
        aux_data_lens=[buffer_bytes],
        aux_item_lens=[ITEM_BYTES],
    )
    return made


def status(manager, room=ROOM, said=KVPoll.Success):
    parts = [b"%d" % room, b"%d" % int(said), b"0"]
    return parts if manager.kv_status_msg_tag is None else [manager.kv_status_msg_tag, *parts, b""]


def metadata(*, room=ROOM, buffer=0, place=2, data=b"m" * ITEM_BYTES, length=None):
    length = len(data) if length is None else length
    numbers = [b"%d" % number for number in (room, buffer, place)]
    return [b"AUX_DATA", *numbers, length.to_bytes(4, "big"), data]


FOREIGN = (
    *([b"STAGING_REQ"], [b"STAGING_REQ", b"7", b"0", b"1", b"10.0.0.1:1"], [b"AUX_DATA"], [b""], [b"GET / HTTP/1.1"]),
    *(metadata(room=8), metadata(buffer=1), metadata(place=NUM_ITEMS), metadata(place=-1), metadata(length=3)),
    *(metadata(data=b"m"), metadata(data=b"m" * 64), [b"CHUNK_READY", b"7"], [b"ABORT_ACK"], [b"ABORT_ACK", b"x"]),
)


def has_ended_within(manager, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while manager.request_status[ROOM] != KVPoll.Success:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def begin(manager, socket):
    manager.server_socket = socket
    starts = getattr(manager, "start_decode_thread", None) or manager._start_decode_listener_thread
    starts()


def test_socket_when_foreign_messages_come_then_nothing_is_written_and_the_next_prefill_server_is_heard(
    manager,
    port,  # noqa: F811
    monkeypatch,
):
    counters = Counters()
    monkeypatch.setattr(report, "_linker", lambda: SimpleNamespace(counters=counters))
    begin(manager, port.socket)
    for message in FOREIGN:
        port.send(message)
    port.send(status(manager))
    assert has_ended_within(manager, 10)
    assert counters.foreign_hand_over_messages == len(FOREIGN)
    assert manager.memory.raw == bytes(len(manager.memory))


def test_socket_when_it_is_sglangs_alone_then_one_frame_ends_it(port, fallen, monkeypatch):  # noqa: F811
    """When this fails, SGLang has learnt it."""
    monkeypatch.setattr(CommonKVManager, "_start_heartbeat_checker_thread", lambda self: None)
    manager = of_a_decode_server(by_mooncake.MooncakeHandOver)
    manager.server_socket = port.socket
    MooncakeKVManager.start_decode_thread(manager)
    port.send([b"STAGING_REQ"])
    assert fallen.get(timeout=10)


def test_message_when_a_prefill_server_says_it_then_it_is_heard(manager):
    tag = b"%d" % ROOM
    said = [status(manager, said=said) for said in (KVPoll.Failed, KVPoll.WaitingForInput, KVPoll.Success)]
    said += [[b"ABORT_ACK", tag, b"0", b"1"], [b"ABORT_ACK", tag], metadata(), metadata(place=0)]
    assert all(is_of_prefill_server(message, manager) for message in said)
    assert not is_of_prefill_server(status(manager, said=KVPoll.Transferring), manager)


def test_message_when_it_is_of_staging_then_it_is_heard_only_where_staging_is_on_and_in_an_open_room(manager):
    chunk = [b"CHUNK_READY", b"7", b"0", b"0", b"4", b"10.0.0.1:1", b"0"]
    asking = [b"STAGING_REQ", b"7", b"0", b"4", b"10.0.0.1:1"]
    for message in (chunk, asking, [*asking, b"0"]):
        assert not is_of_prefill_server(message, manager)
        manager.enable_staging, manager._staging_handler = True, object()
        assert is_of_prefill_server(message, manager)
        assert not is_of_prefill_server([message[0], b"8", *message[2:]], manager)
        assert not is_of_prefill_server([*message[:2], b"9" * 9, *message[3:]], manager)
        manager.enable_staging = False


@given(
    st.sampled_from([b"STAGING_REQ", b"CHUNK_READY", b"ABORT_ACK", b"AUX_DATA", b"KV_STATUS", b"7"]),
    st.lists(st.binary(max_size=20) | st.from_regex(rb"\A-?[0-9]{1,30}\Z"), max_size=9),
)
def test_message_when_it_is_anything_then_no_reading_raises(tag, frames):
    for kind in (by_nixl.NixlHandOver, by_mooncake.MooncakeHandOver):
        manager = of_a_decode_server(kind)
        manager.enable_staging, manager._staging_handler = True, object()
        if is_of_prefill_server([tag, *frames], manager) and tag == b"AUX_DATA":
            assert len(frames[4]) == ITEM_BYTES
