# SPDX-License-Identifier: Apache-2.0
"""Layers leave while later ones are computed; SGLang's own sender around them."""

import contextlib
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl import conn as of_nixl
from test.sglang_plugin.features.pairs.hand_over_rig import (
    NUM_LAYERS,
    NUM_REGIONS,
    NUM_SLOTS,
    DecodeSide,
    Ending,
    SlowAgent,
    make_manager,
)

from banyan.features.pairs.rank import by_nixl, layerwise
from banyan.sglang_plugin import runtime

NUM_ABORTS = 1000


@pytest.fixture
def pair(monkeypatch):
    """Sender and receiver, with a worker; ``agent.stray`` has what was written where it must not."""
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: False)
    agent = SlowAgent(1)
    manager = make_manager(agent)
    assert manager.knows_layers(NUM_LAYERS)
    decode = DecodeSide(manager, agent)

    def work():
        with contextlib.suppress(SystemExit):
            manager.transfer_worker(manager.transfer_queues[0], None, 0)

    worker = threading.Thread(target=work)
    worker.start()
    yield SimpleNamespace(agent=agent, manager=manager, decode=decode)
    manager.transfer_queues[0].put(None)
    worker.join(10)
    assert not worker.is_alive()


def until(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.0005)


def sender_of(manager, room, num_pages):
    sender = by_nixl.NixlSender.__new__(by_nixl.NixlSender)
    sender.kv_mgr, sender.bootstrap_room, sender.conclude_state = manager, room, None
    sender.curr_idx, sender.num_kv_indices, sender.aux_index = 0, num_pages, 0
    sender._transfer_start_time, sender._early_send_wait_event = None, None
    sender._transfer_num_kv_indices = sender._transfer_num_state_indices = 0
    trace = SimpleNamespace(abort=lambda **_: None, trace_req_finish=lambda: None, copy_for_thread=lambda: None)
    sender.trace_ctx, manager.prepare_send_state_indices = trace, lambda states: states
    manager.update_status(room, KVPoll.Bootstrapping)
    manager.rooms.claim(room)
    return sender


def word(room, region, page):
    return room * 10_000 + region * 100 + page


def compute(agent, room, layer, pages):
    """A forward writes a layer's keys and values."""
    for region in (layer, layer + NUM_LAYERS):
        agent.source[[region * NUM_SLOTS + page for page in pages]] = [word(room, region, page) for page in pages]


def forward(pair, sender, pages, first, *, stop_at=NUM_LAYERS):
    """One forward over ``pages``, then their chunk; or as far as ``stop_at`` and then nothing."""
    room, manager = sender.bootstrap_room, pair.manager
    pages = np.array(pages, dtype=np.int32)
    ahead = manager.begin_advance(room, pages, first)
    for layer in range(stop_at):
        if ahead is not None:
            manager.layers_completed(room, ahead, layer)
        compute(pair.agent, room, layer, pages.tolist())
        time.sleep(0)
    if stop_at == NUM_LAYERS:
        # SGLang makes page numbers anew.
        sender.send(pages.copy())


def test_chunk_when_its_layers_left_before_it_then_each_word_is_sent_once_and_all_arrive(pair):
    sender = sender_of(pair.manager, 7, 5)
    pair.decode.asks(7, 5)
    forward(pair, sender, [3, 4, 5], 0)
    forward(pair, sender, [9, 2], 3)
    until(lambda: sender.poll() == KVPoll.Success)
    expected = [[word(7, region, page) for page in (3, 4, 5, 9, 2)] for region in range(NUM_REGIONS)]
    assert pair.decode.words(7).tolist() == expected
    assert pair.agent.num_words == 5 * NUM_REGIONS and not pair.agent.stray


def test_layers_when_the_forward_goes_on_then_those_behind_it_have_left(pair):
    sender = sender_of(pair.manager, 7, 2)
    pair.decode.asks(7, 2)
    pages = np.array([5, 6], dtype=np.int32)
    ahead = pair.manager.begin_advance(7, pages, 0)
    for layer in (0, 1):
        compute(pair.agent, 7, layer, [5, 6])
    pair.manager.layers_completed(7, ahead, 2)
    until(lambda: pair.agent.num_words == 2 * 2 * 2)
    come = pair.decode.words(7)
    assert (come[[0, 1, NUM_LAYERS, NUM_LAYERS + 1]] > 0).all() and (come > 0).sum() == 8
    assert sender.poll() == KVPoll.Transferring


def test_chunk_when_its_decode_server_stands_still_then_it_is_told_and_the_next_one_is_sent(pair, monkeypatch):
    told, tell = [], pair.manager.send_kv_status_message
    pair.manager.send_kv_status_message = lambda **said: (
        told.append((said["bootstrap_room"], said["status"])),
        tell(**said),
    )
    monkeypatch.setattr(layerwise, "SLOW_S", 0.05)
    monkeypatch.setattr(layerwise, "LEAST_BYTES_PER_S", 1 << 40)
    monkeypatch.setattr(of_nixl, "NIXL_ERR_SETTLE_TIMEOUT_S", 0.05)
    look = pair.agent.check_xfer_state
    pair.agent.check_xfer_state = lambda handle: "PROC" if handle["room"] == 7 else look(handle)
    stuck, other = sender_of(pair.manager, 7, 2), sender_of(pair.manager, 8, 2)
    pair.decode.asks(7, 2)
    pair.decode.asks(8, 2)
    forward(pair, stuck, [3, 4], 0)
    forward(pair, other, [5, 6], 0)
    until(lambda: other.poll() == KVPoll.Success)
    assert told == [(7, KVPoll.Failed), (8, KVPoll.Success)]
    assert stuck.poll() == KVPoll.Failed and pair.decode.num_locked == 4, "it may still be written to"
    stuck.clear()
    pair.decode.aborts(7)
    assert pair.decode.num_locked == 4


def test_chunk_when_its_request_is_given_up_at_a_decode_server_that_stands_still_then_others_do_not_wait_for_long(
    pair, monkeypatch
):
    monkeypatch.setattr(layerwise, "SLOW_S", 60.0)
    monkeypatch.setattr(layerwise, "GIVEN_UP_S", 0.05)
    monkeypatch.setattr(layerwise, "LEAST_BYTES_PER_S", 1 << 40)
    monkeypatch.setattr(of_nixl, "NIXL_ERR_SETTLE_TIMEOUT_S", 0.05)
    look = pair.agent.check_xfer_state
    pair.agent.check_xfer_state = lambda handle: "PROC" if handle["room"] == 7 else look(handle)
    stuck, other = sender_of(pair.manager, 7, 2), sender_of(pair.manager, 8, 2)
    pair.decode.asks(7, 2)
    pair.decode.asks(8, 2)
    forward(pair, stuck, [3, 4], 0)
    forward(pair, other, [5, 6], 0)
    stuck.abort()
    until(lambda: other.poll() == KVPoll.Success)


def test_chunk_when_its_pages_are_others_than_announced_then_they_are_sent_whole(pair):
    sender = sender_of(pair.manager, 7, 2)
    pair.decode.asks(7, 2)
    ahead = pair.manager.begin_advance(7, np.array([5, 6], dtype=np.int32), 0)
    for layer in range(NUM_LAYERS):
        compute(pair.agent, 7, layer, [5, 6, 8])
        pair.manager.layers_completed(7, ahead, layer + 1)
    sender.send(np.array([5, 8], dtype=np.int32))
    until(lambda: sender.poll() == KVPoll.Success)
    assert pair.decode.words(7).tolist() == [
        [word(7, region, page) for page in (5, 8)] for region in range(NUM_REGIONS)
    ]


@pytest.mark.parametrize(
    "unfit",
    [
        {"enable_staging": True},
        {"pp_size": 2},
        {"kv_shard_size": 2},
        {"enable_all_cp_ranks_for_transfer": True},
        {"prep_handles": {"": "from"}},
        {"transfer_infos": {}},
    ],
)
def test_advance_when_pages_do_not_go_as_they_are_then_none_begins(unfit):
    manager = make_manager(SlowAgent(1))
    manager.knows_layers(NUM_LAYERS)
    manager.rooms.claim(7)
    DecodeSide(manager, manager.agent).asks(7, 1)
    assert manager.begin_advance(7, np.array([5], dtype=np.int32), 0) is not None
    for name, value in unfit.items():
        setattr(manager, name, value)
    assert manager.begin_advance(7, np.array([5], dtype=np.int32), 0) is None


def test_aborts_when_they_come_at_random_layers_then_no_released_page_is_written_and_no_page_stays_locked(pair):
    rng, manager = random.Random(3), pair.manager
    num_under_way = 0
    answered = []
    for room in range(1, NUM_ABORTS + 1 + NUM_ABORTS // 4):
        num_pages, is_whole = rng.randrange(2, 7), room > NUM_ABORTS
        sender = sender_of(manager, room, num_pages)
        pair.decode.asks(room, num_pages)
        pages = rng.sample(range(NUM_SLOTS), num_pages)
        cut = rng.randrange(1, num_pages)
        if is_whole or rng.random() < 0.5:
            forward(pair, sender, pages[:cut], 0)
            pages, first = pages[cut:], cut
        else:
            first = 0
        forward(pair, sender, pages, first, stop_at=NUM_LAYERS if is_whole else rng.randrange(1, NUM_LAYERS))
        if is_whole:
            until(lambda sender=sender: sender.poll() == KVPoll.Success)
            answered.append((pair.decode.words(room) // 10_000 == room).all())
            pair.decode.release(room, "done")
            sender.clear()
            continue
        num_under_way += manager._staging_outstanding[room] > 0
        if rng.random() < 0.5:
            sender.abort()
        else:
            pair.decode.aborts(room)
            until(lambda sender=sender: sender.poll() == KVPoll.Failed)
        if rng.random() < 0.5:
            sender.clear()
    until(lambda: len(pair.decode.over) == NUM_ABORTS + NUM_ABORTS // 4)
    assert not pair.agent.stray and pair.decode.num_locked == 0
    assert all(answered) and list(pair.decode.over.values()).count("failed") == NUM_ABORTS
    assert num_under_way > NUM_ABORTS // 20, "aborts that came while something was under way"


def test_queue_when_a_thread_takes_a_chunk_then_it_is_sglangs():
    manager = make_manager(SlowAgent(1))
    plain = SimpleNamespace(room=3, prefill_kv_indices=np.array([1]))
    queue = Ending()
    queue.put(plain)
    queue.put(None)
    seen = []
    manager.begins = seen.append
    with pytest.raises(SystemExit):
        manager.transfer_worker(queue)
    assert seen == [plain]


def test_advance_when_its_request_was_given_up_since_its_batch_was_chosen_then_nothing_is_kept_of_it(pair):
    sender = sender_of(pair.manager, 7, 2)
    pair.decode.asks(7, 2)
    sender.abort()
    # The decode server's own message may still be on its way, and make the room anew.
    pair.decode.asks(8, 1)
    pair.manager.transfer_infos[7] = pair.manager.transfer_infos[8]
    assert pair.manager.begin_advance(7, np.array([5, 6], dtype=np.int32), 0) is None
    assert pair.manager._advances == {}
