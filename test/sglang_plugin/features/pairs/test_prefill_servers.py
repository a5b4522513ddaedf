# SPDX-License-Identifier: Apache-2.0
"""A decode server asks an address at which somebody answers what no prefill server says. SGLang's own methods, without
network."""

import threading
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, PrefillServerInfo
from sglang.srt.disaggregation.utils import KVClassType

from banyan.config import Config
from banyan.features.pairs.rank import by_mooncake, by_nixl, prefill_servers
from banyan.features.pairs.rank.hand_over import HandOver
from banyan.features.pairs.unanswered import Unanswered
from banyan.sglang_plugin import runtime

ADDRESS, ROOM = "10.0.0.1:8998", 11
SAID = {
    **{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16},
    **{"kv_cache_dtype": "bfloat16", "follow_bootstrap_room": True, "kv_layout": None},
}


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())


class DecodeTables(HandOver, CommonKVManager):
    """A decode server's, behind its construction."""

    def __init__(self):
        self.prepare()
        self.prefill_info_table, self.connection_pool, self.connection_lock = {}, {}, threading.Lock()
        self.kv_args = SimpleNamespace(page_size=16, engine_rank=0, state_types=[])
        self.kv_cache_dtype_str, self.kv_layout, self.dsv41_spec_layout = "bfloat16", None, None
        self.attn_tp_size = self.attn_cp_size = self.pp_size = self.dcp_size = 1
        self.attn_cp_rank = self.pp_rank = 0
        self.is_mla_backend = self.is_hybrid_mla_backend = False
        self.enable_all_cp_ranks_for_transfer = self.enable_staging = self.defer_decode_allocation = False
        self.request_status, self.failure_records, self.failure_lock = {}, {}, threading.Lock()
        self.deferred_bootstrap, self.required_prefill_response_num_table = None, {}
        self._deferred_ack_targets, self._deferred_ack_poisoned_rooms, self._staging_outstanding = {}, set(), {}


def answering(monkeypatch, said, row=None):
    """``said``: of the server, or of rooms."""
    answer, of_rank = (SimpleNamespace(status_code=200, json=dict(each).copy, text="") for each in (said, row or {}))
    monkeypatch.setattr(conn.requests, "get", lambda url, timeout: answer)
    session = SimpleNamespace(get=lambda url, timeout: of_rank, post=lambda url, json, timeout: answer)
    monkeypatch.setattr(conn, "_get_bootstrap_session", lambda address: session)


@pytest.mark.parametrize(
    "changed",
    [
        *({"attn_tp_size": 0}, {"attn_tp_size": 10**9}, {"attn_tp_size": -1}, {"dp_size": 0}, {"pp_size": 2048}),
        *({"kv_layout": 5}, {"kv_layout": ["a"]}, {"dsv41_spec_layout": [1]}, {"kv_layout": "k" * 1025}),
        {"attn_tp_size": 1024, "attn_cp_size": 1024, "pp_size": 1024},
    ],
)
def test_decode_server_when_an_address_says_what_no_prefill_server_says_then_it_goes_on_and_does_not_know_it(
    monkeypatch, caplog, changed
):
    manager = DecodeTables()
    prefill_servers._say_misfit.cache_clear()
    answering(monkeypatch, SAID | changed)
    assert not manager.try_ensure_parallel_info(ADDRESS)
    assert not manager.prefill_info_table and "does not fit" in caplog.text


def test_decode_server_when_a_prefill_server_says_what_it_is_then_it_is_known(monkeypatch):
    manager = DecodeTables()
    answering(monkeypatch, SAID)
    assert manager.try_ensure_parallel_info(ADDRESS) and ADDRESS in manager.prefill_info_table


class Stopped:
    """A prefill server that takes SGLang's questions and answers none."""

    def __init__(self, monkeypatch):
        self.now_s, self.num_asked = 1000.0, 0
        session = SimpleNamespace(get=self.wait, post=self.wait)
        monkeypatch.setattr(conn.requests, "get", self.wait)
        monkeypatch.setattr(conn, "_get_bootstrap_session", lambda address: session)
        self.unanswered = Unanswered(lambda: self.now_s)

    def wait(self, url, *, timeout, json=None):
        self.num_asked += 1
        self.now_s += timeout
        raise conn.requests.Timeout


def test_decode_server_when_a_prefill_server_is_stopped_then_it_does_not_stand_still_in_every_step(monkeypatch):
    stopped, manager = Stopped(monkeypatch), DecodeTables()
    manager.unanswered = stopped.unanswered
    monkeypatch.setattr(prefill_servers, "_RANKS_OF_ROOMS", Unanswered(lambda: stopped.now_s))
    query = prefill_servers.around_query_prefill_dp_ranks
    for _ in range(15):
        assert not manager.try_ensure_parallel_info(ADDRESS)
    assert stopped.num_asked == 1
    for _ in range(15):
        assert query(CommonKVReceiver.query_prefill_dp_ranks, ADDRESS, [ROOM]) == {}
    assert stopped.num_asked == 2
    manager.prefill_info_table[ADDRESS] = object()
    assert manager.try_ensure_parallel_info(ADDRESS)
    stopped.now_s += 100
    receiver = receiver_of(by_nixl, manager)
    assert [receiver._get_bootstrap_info_from_server(0, 0, 0, 0) for _ in range(15)] == [None] * 15
    assert stopped.num_asked == 3


def test_decode_server_when_a_loaded_prefill_server_has_no_such_room_yet_then_it_is_asked_again_at_once(monkeypatch):
    now_s, said = 1000.0, [{}, {}, {str(ROOM): 1}]

    def answer(*asked):
        nonlocal now_s
        now_s += 1.5
        return said.pop(0)

    monkeypatch.setattr(prefill_servers, "_RANKS_OF_ROOMS", Unanswered(lambda: now_s))
    query = prefill_servers.around_query_prefill_dp_ranks
    assert [query(answer, ADDRESS, [ROOM]) for _ in range(3)] == [{}, {}, {str(ROOM): 1}]


def receiver_of(engine, manager):
    kind = engine.CLASSES[KVClassType.RECEIVER]
    receiver = kind.__new__(kind)
    receiver.kv_mgr, receiver.bootstrap_addr, receiver.bootstrap_room = manager, ADDRESS, ROOM
    return receiver


@pytest.mark.parametrize("engine", [by_nixl, by_mooncake], ids=["nixl", "mooncake"])
def test_request_when_another_server_has_come_to_the_address_then_it_fails_and_the_next_one_knows(monkeypatch, engine):
    manager, row = DecodeTables(), {"rank_ip": "10.0.0.1", "rank_port": 5}
    answering(monkeypatch, SAID | {"kv_layout": "a"}, row)
    assert manager.try_ensure_parallel_info(ADDRESS)
    receiver = receiver_of(engine, manager)
    assert receiver._get_bootstrap_info_from_server(0, 0, 0, 0) == row | {"pp_rank": 0}
    answering(monkeypatch, SAID | {"kv_layout": "b"}, row)
    assert receiver._get_bootstrap_info_from_server(0, 0, 0, 0) is None
    assert manager.prefill_info_table[ADDRESS].kv_layout == "b"
    assert receiver._get_bootstrap_info_from_server(0, 0, 0, 0) is not None
    answering(monkeypatch, SAID | {"page_size": 32}, row)
    assert receiver._get_bootstrap_info_from_server(0, 0, 0, 0) is None
    assert manager.prefill_info_table[ADDRESS].kv_layout == "b"


@pytest.mark.parametrize(
    ("row", "status", "is_lost"),
    [
        ({"rank_ip": "10.0.0.1", "rank_port": 5}, 200, False),
        ({"rank_ip": "10.0.0.1", "rank_port": 6}, 200, True),
        ({"rank_ip": "10.0.0.9", "rank_port": 5}, 200, True),
        ({}, 503, True),
    ],
    ids=["the same", "other port", "other address", "starting"],
)
def test_request_when_its_prefill_server_has_started_anew_between_two_heartbeats_then_it_fails(
    monkeypatch, row, status, is_lost
):
    manager, first = DecodeTables(), {"rank_ip": "10.0.0.1", "rank_port": 5}
    answering(monkeypatch, SAID, first)
    assert manager.try_ensure_parallel_info(ADDRESS)
    told = receiver_of(by_nixl, manager)._get_bootstrap_info_from_server(0, 0, 2, 1)
    manager.connection_pool[f"{ADDRESS}_0_0_2"] = [told]
    manager.request_status[ROOM], manager.addr_to_rooms_tracker = KVPoll.WaitingForInput, {ADDRESS: {ROOM}}
    manager.heartbeat_interval, manager.max_failures, manager.heartbeat_failures = 0.01, 2, {}
    manager._heartbeat_shutdown, manager.session_pool_lock = threading.Event(), threading.Lock()
    asked = []

    def get(url, timeout, headers=None):
        if url.endswith("/health"):
            asked.clear()
            return SimpleNamespace(status_code=200)
        asked.append(url)
        manager._heartbeat_shutdown.set()
        return SimpleNamespace(status_code=status, json=lambda: row)

    manager.session_pool = {ADDRESS: SimpleNamespace(get=get)}
    manager._start_heartbeat_checker_thread().join(10)
    (url,) = asked
    assert url.endswith("/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=2&target_pp_rank=1")
    assert (manager.request_status[ROOM] == KVPoll.Failed) is is_lost
    assert (not manager.prefill_info_table and not manager.connection_pool and not manager.first_rows) is is_lost


@pytest.mark.parametrize("engine", [by_nixl, by_mooncake], ids=["nixl", "mooncake"])
@pytest.mark.parametrize("row", [{}, {"rank_ip": "10.0.0.1"}, {"rank_ip": 5, "rank_port": {}}], ids=str)
def test_request_when_the_row_of_a_prefill_servers_rank_cannot_be_read_then_it_fails_and_the_decode_server_goes_on(
    monkeypatch, engine, row
):
    manager = DecodeTables()
    manager.build_receiver_registration_message = lambda: [b"None"]
    monkeypatch.setattr(conn, "get_disagg", lambda: SimpleNamespace(disaggregation_decode_allocation_policy="early"))
    answering(monkeypatch, SAID)
    assert manager.try_ensure_parallel_info(ADDRESS)
    answering(monkeypatch, SAID, row)
    receiver = receiver_of(engine, manager)
    receiver.conclude_state, receiver._connection_pool_entries, receiver.require_staging = None, {}, False
    receiver.abort_notified = False
    manager.update_status(ROOM, KVPoll.Bootstrapping)
    receiver.init(0)
    assert receiver.conclude_state == manager.request_status[ROOM] == KVPoll.Failed
    assert "cannot be reached" in manager.failure_records[ROOM] and not manager.connection_pool
    receiver.abort()


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ({"11": 1, "12": 0}, {"11": 1, "12": 0}),
        ({"11": "x", "12": -1, "13": 2}, {}),
        ({"11": None, "12": [1]}, {}),
        ({"11": True, "12": 10**9}, {}),
        ([1, 2], {}),
        ("11", {}),
    ],
)
def test_ranks_of_rooms_when_an_address_says_anything_then_numbers_of_the_asked_rooms_are_heard_only(said, heard):
    assert prefill_servers.around_query_prefill_dp_ranks(lambda *asked: said, ADDRESS, [11, 12]) == heard


def test_check_when_sizes_are_those_of_a_large_server_then_it_passes():
    prefill_servers.check(PrefillServerInfo(**SAID | {"attn_tp_size": 16, "dp_size": 32, "pp_size": 2}))


def test_query_when_it_is_sglangs_alone_then_a_list_is_passed_on(monkeypatch):
    """When this fails, SGLang has learnt it."""
    answer = SimpleNamespace(status_code=200, json=lambda: [1])
    monkeypatch.setattr(conn, "_get_bootstrap_session", lambda address: SimpleNamespace(post=lambda *_, **__: answer))
    assert CommonKVReceiver.query_prefill_dp_ranks(ADDRESS, [ROOM]) == [1]
