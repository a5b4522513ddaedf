# SPDX-License-Identifier: Apache-2.0
"""A decode server's request from its match to the end of its hand-over: SGLang's match, with a queue and a receiver
that stand in for SGLang's, and pages that move through the native core."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode_hicache_mixin import DecodePrefixMatch
from test.unit.directory.rig import Rank, frames, keys

from banyan._native import RankTable
from banyan.features.pairs.rank import at_rank
from banyan.features.pairs.rank.taking_back import FAILED, TakingReceiver, after_match_prefix_and_lock, collect
from banyan.features.pairs.take_back import State, TakeBacks
from banyan.planner import Action
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.quarantine import frame_array
from banyan.sglang_plugin.rank import requests
from banyan.telemetry import Counters

PAGE = 16
NUM_HELD = 2
PROMPT = keys(1, 2, 3, 4, 5)


class SGLangReceiver:
    """What Banyan's receiver stands in front of."""

    def __init__(self):
        self.state, self.sent, self.failures = KVPoll.WaitingForInput, [], []
        self.bootstrap_room = 11
        self.kv_mgr = SimpleNamespace(record_failure=lambda room, why: self.failures.append((room, why)))

    def send_metadata(self, *args, **named):
        self.sent.append(named)

    def poll(self):
        return self.state


class Receiver(TakingReceiver, SGLangReceiver):
    pass


class Server:
    def __init__(self, monkeypatch):
        rank_table = RankTable.create(2)
        self.arena, self.pool = Rank(rank_table, 0), Rank(rank_table, 1)
        self.arena.frame_table.publish(frames(3, 4, 5, 6), PROMPT[:4])
        self.counters = Counters()
        self.take_backs = TakeBacks(lambda: self.pool.peers, [0], self.counters)
        self.free = [[7, 8], [9, 10]]
        self.row = torch.full((1, 8 * PAGE), -1, dtype=torch.int32)
        self.req = SimpleNamespace(
            rid="r", session=None, banyan_asked=None, kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=0)
        )
        self.receiver = Receiver()
        self.queue = SimpleNamespace(
            queue=[SimpleNamespace(req=self.req, kv_receiver=self.receiver)],
            scheduler=SimpleNamespace(kv_checksum_computer=None),
            token_to_kv_pool_allocator=SimpleNamespace(alloc=self.alloc),
            req_to_token_pool=SimpleNamespace(write=self.write),
        )
        rank = SimpleNamespace(page_tokens=PAGE, frames=lambda slots: frame_array(slots[::PAGE] // PAGE))
        monkeypatch.setattr(at_rank, "_at", SimpleNamespace(take_backs=self.take_backs, rank=rank))
        monkeypatch.setattr(runtime, "is_sharing", lambda: True)
        monkeypatch.setattr(requests, "is_known", lambda req: True)
        monkeypatch.setattr(requests, "prompt_keys", lambda rid, page_tokens: list(PROMPT))

    def alloc(self, num_tokens):
        if not self.free:
            return None
        pages = self.free.pop(0)
        assert num_tokens == len(pages) * PAGE
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    def write(self, place, slots):
        row, part = place
        self.row[row, part] = slots.to(torch.int32)

    def match(self):
        found = DecodePrefixMatch(torch.arange(NUM_HELD * PAGE), 0, 0, last_device_node=None)
        after_match_prefix_and_lock(found, self.queue, self.req)
        return found

    def let_in(self, found):
        """What SGLang does between a match and ``send_metadata``."""
        self.req.kv.cache_protected_len = found.decode_prefix_len
        self.receiver.send_metadata(decode_prefix_len=found.decode_prefix_len)


@pytest.fixture
def server(monkeypatch):
    return Server(monkeypatch)


def settle(server):
    server.receiver.taken.take_back.settle()
    collect()


def test_request_when_the_arena_has_more_than_the_pool_then_it_is_not_asked_for_and_the_slots_are_the_requests_own(
    server,
):
    found = server.match()
    assert found.decode_prefix_len == 4 * PAGE and found.restore_token_count == 2 * PAGE
    server.let_in(found)
    assert server.receiver.sent == [{"decode_prefix_len": 4 * PAGE}]
    # SGLang frees from here on with the request, and finds nothing to restore.
    assert server.req.kv.cache_protected_len == NUM_HELD * PAGE and not found.needs_local_restore
    assert server.row[0, 2 * PAGE : 4 * PAGE].tolist() == list(range(7 * PAGE, 9 * PAGE))
    assert server.row[0, 4 * PAGE :].tolist() == [-1] * 4 * PAGE
    settle(server)
    assert [server.pool.pages(page) for page in (7, 8)] == [server.arena.pages(page) for page in (5, 6)]


def test_hand_over_when_it_ends_before_the_copy_then_it_counts_as_under_way(server):
    server.let_in(server.match())
    server.receiver.state = KVPoll.Success
    take_back = server.receiver.taken.take_back
    assert take_back.state is State.COPYING and server.receiver.poll() == KVPoll.Transferring
    settle(server)
    assert server.receiver.poll() == KVPoll.Success and server.counters.taken_back_pages == 2


def test_request_when_it_fails_then_the_copy_has_ended_before_sglang_hears_of_it(server):
    server.let_in(server.match())
    server.receiver.state = KVPoll.Failed
    assert server.receiver.poll() == KVPoll.Failed
    assert server.receiver.taken.take_back.state is State.IN
    collect()
    assert server.take_backs.num_open == 0 and server.receiver.failures == []


def test_request_when_the_pool_has_no_slots_then_it_fails_with_the_words_that_have_the_next_attempt_computed(server):
    server.free = []
    server.let_in(server.match())
    # Told all the same, so that the prefill server does not wait; and what SGLang takes for the tree's is not freed.
    assert server.receiver.sent and server.req.kv.cache_protected_len == 4 * PAGE
    assert server.receiver.poll() == KVPoll.Failed and server.receiver.failures == [(11, FAILED)]
    collect()
    assert (server.take_backs.num_open, server.counters.take_backs_failed) == (0, 1)
    assert server.match().decode_prefix_len == NUM_HELD * PAGE, "the next attempt is sent all of it"


def test_request_when_its_copy_cannot_be_begun_then_it_alone_fails(server, monkeypatch):
    def fails(promised, frames):
        raise OSError("cannot start the copy thread")

    monkeypatch.setattr(server.take_backs, "begin", fails)
    server.let_in(server.match())
    # The slots are its own, and go with it.
    assert server.receiver.sent and server.req.kv.cache_protected_len == NUM_HELD * PAGE
    assert server.receiver.poll() == KVPoll.Failed and server.receiver.failures == [(11, FAILED)]
    collect()
    assert server.take_backs.num_open == 0
    assert len(server.arena.frame_table.retire(frames(5, 6))) == 16, "nobody reads them"


def test_request_when_it_is_matched_again_and_again_before_there_is_room_then_each_promise_ends_with_its_step(server):
    for _ in range(3):
        assert server.match().decode_prefix_len == 4 * PAGE
        collect()
        assert server.take_backs.num_open == 0 and server.receiver.poll() == KVPoll.WaitingForInput
    server.receiver.send_metadata(decode_prefix_len=0)
    assert server.receiver.taken.take_back.state is State.LET_GO and len(server.free) == 2


@pytest.mark.parametrize("why", ["compute", "session", "checksums", "another receiver", "not registered"])
def test_request_when_it_is_of_another_kind_then_all_is_sent_as_sglang_sends_it(server, monkeypatch, why):
    if why == "compute":
        server.req.banyan_asked = Action.COMPUTE
    elif why == "session":
        server.req.session = object()
    elif why == "checksums":
        server.queue.scheduler.kv_checksum_computer = object()
    elif why == "another receiver":
        server.queue.queue[0].kv_receiver = SGLangReceiver()
    else:
        monkeypatch.setattr(requests, "prompt_keys", lambda request, page_tokens: None)
    assert server.match().decode_prefix_len == NUM_HELD * PAGE
    assert server.take_backs.num_open == 0
