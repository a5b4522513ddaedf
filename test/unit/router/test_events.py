# SPDX-License-Identifier: Apache-2.0
"""A feed never holds what may have been removed unseen."""

from __future__ import annotations

import msgspec
import pytest

from banyan.router.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventFeed, read_batch


def batch(ts, *events):
    return EventBatch(float(ts), list(events))


def test_batch_when_it_carries_more_than_is_read_then_the_rest_is_passed_over():
    stored = {"type": "BlockStored", "block_hashes": [-5], "parent_block_hash": None, "token_ids": [1], "new": 1}
    payload = msgspec.msgpack.encode([1.5, [stored, {"type": "AllBlocksCleared"}], 3, "later"])
    assert read_batch(payload) == EventBatch(1.5, [BlockStored([-5]), AllBlocksCleared()], 3)


def test_batch_when_an_event_is_unknown_then_an_error_and_no_guess():
    with pytest.raises(msgspec.DecodeError):
        read_batch(msgspec.msgpack.encode([1.0, [{"type": "BlockMoved", "block_hashes": [1]}], 0]))


@pytest.mark.parametrize("ts", [float("inf"), float("nan")])
def test_batch_when_its_time_is_none_then_an_error_for_no_restart_could_be_told_after_it(ts):
    with pytest.raises(msgspec.DecodeError, match="time"):
        read_batch(msgspec.msgpack.encode(EventBatch(ts, [])))


def test_feed_when_batches_come_in_order_then_nothing_is_missing():
    feed = EventFeed()
    for seq, event in enumerate((BlockStored([1, 2]), BlockRemoved([2]), BlockStored([3]))):
        assert feed.first_missing(seq, batch(seq + 1, event)) is None
        feed.apply(seq, batch(seq + 1, event))
    assert 1 in feed.blocks and 2 not in feed.blocks and 3 in feed.blocks


def test_feed_when_a_hole_stays_then_it_starts_again_empty():
    feed = EventFeed()
    feed.apply(0, batch(1, BlockStored([1])))
    assert feed.first_missing(2, batch(3, BlockStored([3]))) == 1
    feed.apply(2, batch(3, BlockStored([3])))
    assert 1 not in feed.blocks and 3 in feed.blocks and feed.num_holes == 1


def test_feed_when_a_hole_is_filled_then_the_overlap_is_applied_once():
    feed = EventFeed()
    feed.apply(0, batch(1, BlockStored([1])))
    for seq, event in ((1, BlockStored([2])), (2, BlockRemoved([1]))):
        feed.apply(seq, batch(seq + 1, event))
    late = batch(2, BlockStored([2]))
    assert feed.first_missing(1, late) is None
    feed.apply(1, late)
    assert feed.next_seq == 3 and feed.num_holes == 0 and 1 not in feed.blocks


def test_feed_when_numbers_go_back_on_a_new_batch_then_the_rank_has_restarted():
    feed = EventFeed()
    for seq in range(5):
        feed.apply(seq, batch(seq + 1, BlockStored([seq])))
    assert feed.first_missing(2, batch(100, BlockStored([77]))) == 0
    feed.apply(2, batch(100, BlockStored([77])))
    assert len(feed.blocks) == 1 and 77 in feed.blocks


def test_feed_when_the_router_is_late_then_it_asks_from_the_beginning():
    assert EventFeed().first_missing(7, batch(1)) == 0
    assert EventFeed().first_missing(0, batch(1)) is None


def test_feed_when_it_has_heard_all_since_the_first_batch_or_a_flush_then_it_is_whole():
    feed = EventFeed()
    assert not feed.is_whole, "the rank may hold what it told before"
    feed.apply(0, batch(1, BlockStored([1])))
    assert feed.is_whole
    feed.apply(2, batch(3, BlockStored([3])))
    assert not feed.is_whole
    feed.apply(3, batch(4, AllBlocksCleared(), BlockStored([4])))
    assert feed.is_whole and 4 in feed.blocks
    feed.forget()
    assert not feed.is_whole
    feed.apply(7, batch(9, BlockStored([1])))
    assert not feed.is_whole, "what was before cannot be had any more"
