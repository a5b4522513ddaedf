# SPDX-License-Identifier: Apache-2.0
"""An id is under way at one of a server's HTTP workers at a time, and a room of a pair is one request's."""

import asyncio
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import taken_ids
from banyan.sglang_plugin.prompt_refusals import BadRequest


@pytest.fixture(autouse=True)
def one_of_several(monkeypatch):
    taken_ids.make_file.cache_clear()
    carried = {"taken": taken_ids.make_file()}
    monkeypatch.setattr(taken_ids, "get_server_args", lambda: SimpleNamespace(_banyan=carried))
    monkeypatch.setattr(runtime, "is_front", lambda: True)
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "null")
    for name, nothing in (("_taken", set()), ("_rooms", set()), ("_room_of", {})):
        monkeypatch.setattr(taken_ids, name, nothing)
    monkeypatch.setattr(taken_ids, "_is_looking", False)
    taken_ids._file.cache_clear()


def manager(*rids):
    return SimpleNamespace(rid_to_state=dict.fromkeys(rids))


def take(rid, known, room=None):
    async def begin():
        taken_ids.take(rid, known)
        taken_ids.take_room(room, rid)

    asyncio.run(begin())


@pytest.fixture
def other_worker():
    """What another process says to commands; it ends with the test."""
    ours, theirs = multiprocessing.Pipe()

    def obey():
        taken_ids._file.cache_clear()
        known = manager("a", "\ud800")
        while True:
            rid, room = theirs.recv()
            try:
                if rid is None:
                    known.rid_to_state.clear()
                    taken_ids.let_go(["a", "\ud800"], known)
                else:
                    take(rid, known, room)
                theirs.send("done")
            except BadRequest as error:
                theirs.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=obey, daemon=True)
    process.start()

    def ask(rid, room=None):
        ours.send((rid, room))
        return ours.recv()

    ask.pid = process.pid
    ask.join = process.join
    yield ask
    process.kill()
    process.join()


@pytest.mark.parametrize("rid", ["a", "\ud800"])
def test_request_when_its_id_is_under_way_at_another_worker_then_refused_until_that_is_over(other_worker, rid):
    assert other_worker(rid) == "done"
    with pytest.raises(BadRequest, match="use another id"):
        take(rid, manager(rid))
    take("b", manager("b"))
    assert other_worker(None) == "done"
    take(rid, manager(rid))
    assert "under way" in other_worker(rid)


def test_request_when_the_worker_that_had_its_id_has_ended_then_it_is_served(other_worker):
    assert other_worker("a") == "done"
    os.kill(other_worker.pid, signal.SIGKILL)
    other_worker.join()
    take("a", manager("a"))


@pytest.mark.parametrize(
    ("ended", "left"),
    [("a", ["b", "c"]), (["a", ["b"], "c", "unknown"], ["b"]), (None, ["a", "b", "c"]), (5, ["a", "b", "c"])],
)
def test_ids_when_a_request_is_over_then_its_own_are_free_and_no_other_is_looked_at(ended, left):
    for rid in "abc":
        take(rid, manager(rid))
    taken_ids.let_go(ended, manager())
    assert sorted(taken_ids._taken) == left


def test_id_when_sglang_forgets_it_while_nobody_waits_then_it_is_free_soon(other_worker, monkeypatch):
    monkeypatch.setattr(taken_ids, "LOOK_PERIOD_S", 0.01)
    known = manager("a", "b")

    async def run():
        taken_ids.take("a", known)
        taken_ids.take("b", known)
        del known.rid_to_state["a"]
        while "a" in taken_ids._taken:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert other_worker("a") == "done" and taken_ids._taken == {"b"}


def test_room_when_another_request_here_or_at_another_worker_is_under_way_in_it_then_refused_until_that_is_over(
    other_worker,
):
    take("b", manager("b"), 7)
    take("b", manager("b"), 7)
    with pytest.raises(BadRequest, match="leave it to the router"):
        take("c", manager("c"), 7)
    assert "under way in 7" in other_worker("a", 7)
    assert other_worker("a", 8) == "done"
    with pytest.raises(BadRequest, match="leave it to the router"):
        take("d", manager("d"), 8)
    taken_ids.let_go("b", manager())
    take("c", manager("c"), 7)
    assert other_worker(None) == "done"
    take("d", manager("d"), 8)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_room_when_one_process_answers_all_clients_of_a_pair_then_it_is_one_requests_all_the_same(monkeypatch, mode):
    monkeypatch.setattr(runtime, "is_front", lambda: False)
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: mode)
    take("a", manager("a"), 7)
    with pytest.raises(BadRequest, match="leave it to the router"):
        take("b", manager("b"), 7)
    with pytest.raises(BadRequest, match="63 bits"):
        take("c", manager("c"), -1)


def test_id_when_one_process_answers_all_clients_then_sglang_alone_looks_at_it(monkeypatch):
    monkeypatch.setattr(runtime, "is_front", lambda: False)
    take("a", manager("a"))
    assert not taken_ids._taken


@pytest.mark.parametrize("rid", ["room 7", "bootstrap_room 7", "7"])
def test_id_when_it_is_a_name_of_somebodys_room_then_both_are_under_way(other_worker, rid):
    take("b", manager("b"), 7)
    assert other_worker(rid) == "done"
    taken_ids.let_go("b", manager())
    with pytest.raises(BadRequest, match="use another id"):
        take(rid, manager(rid))


@pytest.mark.parametrize("room", [-1, 1 << 63, "7", 7.0, [7], True])
def test_room_when_it_is_none_that_decode_servers_can_ask_for_then_refused(room):
    with pytest.raises(BadRequest, match="63 bits"):
        take("a", manager("a"), room)
