# SPDX-License-Identifier: Apache-2.0
"""What a decode server takes back: the decision, and the way of the pages over the real native core."""

from dataclasses import replace

import pytest
from test.unit.directory.rig import Rank, frames, ids, keys

from banyan._native import RankTable
from banyan.features.pairs.roles import Role
from banyan.features.pairs.take_back import State, TakeBacks, can_take_back
from banyan.layout import Layout
from banyan.telemetry import Counters

ALONE = Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=1)
FITS = {"role": Role.DECODE, "layout": ALONE, "has_arena": True, "num_pools": 1, "is_on_gpu": False}


def asked(fits) -> bool:
    return can_take_back(fits["role"], fits["layout"], **{name: fits[name] for name in list(FITS)[2:]})


def test_rank_when_it_is_alone_with_one_pool_and_an_arena_then_it_takes_back():
    assert asked(FITS) and asked({**FITS, "layout": replace(ALONE, dp=4)})


@pytest.mark.parametrize(
    "other",
    [
        {"role": Role.PREFILL},
        {"role": Role.ALONE},
        {"layout": replace(ALONE, attn_tp=2)},
        {"layout": replace(ALONE, attn_cp=2)},
        {"layout": replace(ALONE, attn_dp=2)},
        {"has_arena": False},
        {"num_pools": 2},
        {"is_on_gpu": True},
    ],
)
def test_rank_when_anything_might_differ_then_all_is_sent_as_before(other):
    assert not asked({**FITS, **other})


class Server:
    """An arena, and the pool of a rank that takes back from it."""

    def __init__(self):
        rank_table = RankTable.create(2)
        self.arena, self.pool = Rank(rank_table, 0), Rank(rank_table, 1)
        self.counters = Counters()
        self.take_backs = TakeBacks(lambda: self.pool.peers, [0], self.counters)

    def has_lent(self, *wanted) -> bool:
        """Whether these frames of the arena, given up now, would be in somebody's hands."""
        return ids(self.arena.frame_table.retire(frames(*wanted))) != list(wanted)


@pytest.fixture
def server():
    made = Server()
    made.arena.frame_table.publish(frames(3, 4, 5), keys(1, 2, 3))
    return made


def test_pages_when_the_pool_has_the_first_then_those_behind_it_come_from_the_arena(server):
    promised = server.take_backs.promise(keys(1, 2, 3, 4), 1)
    assert promised.num_pages == 2
    server.take_backs.begin(promised, frames(7, 8))
    server.take_backs.poll()
    promised.settle()
    server.take_backs.poll()
    assert promised.state is State.IN and server.take_backs.num_open == 0
    assert [server.pool.pages(frame) for frame in (7, 8)] == [server.arena.pages(frame) for frame in (4, 5)]
    assert (server.counters.taken_back_pages, server.counters.take_backs_failed) == (2, 0)
    assert not server.has_lent(3, 4, 5)


def test_prompt_when_the_arena_has_nothing_behind_what_the_pool_has_then_nothing_is_promised(server):
    assert server.take_backs.promise(keys(1, 2, 3), 3) is None
    assert server.take_backs.promise(keys(8, 1), 0) is None
    assert server.take_backs.promise([], 0) is None


def test_page_when_it_leaves_the_arena_behind_the_promise_then_it_stays_until_it_is_in(server):
    promised = server.take_backs.promise(keys(1, 2, 3), 0)
    assert server.has_lent(3, 4, 5)
    server.take_backs.begin(promised, frames(7, 8, 9))
    promised.settle()
    assert promised.state is State.IN
    assert [server.pool.pages(frame) for frame in (7, 8, 9)] == [server.arena.pages(frame) for frame in (3, 4, 5)]
    assert ids(server.arena.frame_table.drain()) == [3, 4, 5]


def test_promise_when_the_request_was_not_let_in_then_its_lease_ends_with_the_step(server):
    promised = server.take_backs.promise(keys(1, 2, 3), 0)
    server.take_backs.poll()
    assert promised.state is State.LET_GO and server.take_backs.num_open == 0
    assert not server.has_lent(3, 4, 5)
    assert server.counters.take_backs_failed == 0


def test_promise_when_the_pool_has_no_place_then_it_fails_and_the_next_attempt_is_promised_nothing(server):
    promised = server.take_backs.promise(keys(1, 2, 3), 0)
    promised.has_no_place()
    server.take_backs.poll()
    assert promised.state is State.FAILED and server.counters.take_backs_failed == 1
    assert server.take_backs.promise(keys(1, 2, 3), 0) is None
    assert server.take_backs.promise(keys(1, 2), 0) is not None, "another prompt"
    server.take_backs.poll()
    assert not server.has_lent(3, 4, 5)


def test_weights_when_they_change_then_whoever_has_not_gone_on_fails_and_nothing_is_written_any_more(server):
    one, other = (server.take_backs.promise(keys(*asked), 0) for asked in ((1, 2, 3), (1, 2)))
    server.take_backs.begin(one, frames(7, 8, 9))
    server.take_backs.quiesce()
    assert (one.state, other.state, server.take_backs.num_open) == (State.FAILED, State.LET_GO, 0)
    assert not server.has_lent(3, 4, 5)


def test_doubts_when_there_are_too_many_then_the_oldest_is_forgotten(server):
    server.take_backs._doubted.most = 1
    for asked in ((1, 2), (1, 2, 3)):
        server.take_backs.promise(keys(*asked), 0).has_no_place()
        server.take_backs.poll()
    assert server.take_backs.promise(keys(1, 2), 0) is not None
    assert server.take_backs.promise(keys(1, 2, 3), 0) is None
