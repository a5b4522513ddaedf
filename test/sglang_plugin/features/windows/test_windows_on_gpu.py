# SPDX-License-Identifier: Apache-2.0
"""A model with sliding windows on a GPU, with the fake driver: full and window pages from a peer, the arena and the
store, both or neither."""

import time
from collections import Counter
from unittest.mock import Mock

import pytest
from test.sglang_plugin.features.windows.window_gpu import (
    FULL,
    PAGE,
    PLAIN,
    TOKENS,
    WINDOW_PAGES,
    WindowDevice,
    accesses,
    equal,
    in_one_allocation,
    let_the_device_run,
    make_node,
    publish,
)
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.test_linker_on_gpu import damage
from test.unit.directory.rig import keys

from banyan import faults
from banyan.config import Config
from banyan.sglang_plugin.pools import allocator


@pytest.fixture
def ranks(monkeypatch):
    return make_node(monkeypatch, PLAIN)


# ---- the path of a fetch


def test_prefix_when_a_peer_has_it_then_both_kinds_come_and_the_scheduler_only_enqueued(ranks):
    owner, reader = ranks
    names = keys(1, 2, 3)
    full, window = publish(owner, names)
    assert reader.lookup(names) == [3]
    own = reader.load(names)
    assert reader.land()
    expected = owner.content(full, window[-WINDOW_PAGES * PAGE :])
    assert not equal(reader.content(*own), expected), "nothing has run yet"
    let_the_device_run(ranks)
    assert equal(reader.content(*own), expected)


def test_prefix_when_window_layers_have_other_heads_then_both_kinds_come(monkeypatch):
    """As Gemma 4's."""
    ranks = owner, reader = make_node(
        monkeypatch, PLAIN, v_head_dim=8, swa_head_num=4, swa_head_dim=4, swa_v_head_dim=4
    )
    sizes = [len(part.banyan_geometry.page.layers) * part.head_num * part.head_dim for part in owner.parts]
    assert [part.banyan_geometry.page.page_bytes for part in owner.parts] == [size * PAGE * 2 * 2 for size in sizes]
    names = keys(1, 2)
    full, window = publish(owner, names)
    assert owner.parts[1].head_dim == 4 and reader.lookup(names) == [2]
    own = reader.load(names)
    assert reader.land()
    let_the_device_run(ranks)
    assert equal(reader.content(*own), owner.content(full, window))


def test_node_when_its_forward_has_not_ended_then_neither_kind_is_published(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    full, window = owner.alloc(2, 2)
    owner.gpu.enqueue(owner.forward, lambda: None, lambda: False)
    owner.offload(names, full, window)
    while owner.gpu.step():
        pass
    assert owner.poll() == 0 and reader.lookup(names) == []
    owner.gpu.streams[owner.forward].popleft()
    let_the_device_run(ranks)
    assert owner.poll() == 1 and reader.lookup(names, "s") == [2]


def test_prefix_when_windows_were_freed_then_the_longest_that_has_its_window_is_offered(ranks):
    owner, reader = ranks
    publish(owner, keys(1, 2))
    publish(owner, keys(3, 4), num_windowed=0)
    assert reader.lookup(keys(1, 2, 3, 4)) == [2]


def test_load_when_a_window_page_has_gone_then_nothing_is_held(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    full, window = publish(owner, names)
    assert reader.lookup(names) == [2]
    owner.free(full[:0], window)
    let_the_device_run(ranks)
    assert reader.load(names) is None
    owner.free(full, window[:0])
    let_the_device_run(ranks)
    assert owner.full._num_held == 0 and owner.window._num_held == 0


def test_window_when_its_pages_are_freed_under_a_reader_then_they_come_back_after_the_copy(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    full, window = publish(owner, names)
    reader.lookup(names)
    assert reader.load(names) is not None
    index = reader.start()
    owner.free(full, window)
    assert owner.window.available_size() == TOKENS // 2
    assert reader.finish(index)
    owner.poll()
    assert len(owner.window.free_pages) == TOKENS // 2 // PAGE - 2, "the copy has not run"
    owner.gpu.run()
    deadline_s = time.monotonic() + 5
    while owner.full._num_held + owner.window._num_held and time.monotonic() < deadline_s:
        owner.poll()
    assert len(owner.window.free_pages) == TOKENS // 2 // PAGE and len(owner.full.free_pages) == TOKENS // PAGE


def test_batch_when_one_kinds_copy_cannot_be_begun_then_it_fails_and_the_others_keeps_its_leases(ranks, monkeypatch):
    owner, reader = ranks
    names = keys(1, 2)
    full, window = publish(owner, names)
    reader.lookup(names)
    targets = reader.load(names)
    (windows,) = reader.linker.cache._beside
    monkeypatch.setattr(windows.supply, "start_copy", Mock(side_effect=RuntimeError("a fault")))
    monkeypatch.setattr(faults, "_counts", Counter())
    index = reader.start()
    owner.free(full, window)
    assert not reader.finish(index) and faults.counts() == {"cache.start": 1}
    owner.poll()
    assert len(owner.full.free_pages) == TOKENS // PAGE - 2, "the copy has not run"
    owner.gpu.run()
    deadline_s = time.monotonic() + 5
    while owner.full._num_held and time.monotonic() < deadline_s:
        owner.poll()
    assert len(owner.full.free_pages) == TOKENS // PAGE and targets is not None


def test_weights_when_updated_then_what_was_under_way_or_published_is_not_found(ranks):
    owner, reader = ranks
    publish(owner, keys(1, 2))
    full, window = owner.alloc(2, 2)
    owner.offload(keys(3, 4), full, window)
    for rank in ranks:
        with rank.on(rank.schedule):
            rank.linker.weights_changed()
    assert owner.poll() == 1 and not owner.linker.pop_completed_offload()
    for rank in ranks:
        rank.meet_peers()
    assert reader.lookup(keys(1, 2)) == [] and reader.lookup(keys(3, 4), "s") == []


def test_reset_when_a_batch_is_under_way_then_no_copy_of_either_pool_is_left(ranks, monkeypatch):
    owner, reader = ranks
    names = keys(1, 2)
    publish(owner, names)
    reader.lookup(names)
    assert reader.load(names) is not None
    index = reader.start()
    assert reader.finish(index)
    monkeypatch.setattr(allocator.time, "sleep", lambda seconds: reader.gpu.step())
    with reader.on(reader.schedule):
        reader.linker.reset()
    assert all(not one.num_under_way for one in reader.linker.kinds.full.access._rank_device.readers)


# ---- the tiers


ARENA = Config(min_fetch_tokens=PAGE, host_gb=0.002)


def go_on_until(rank, condition):
    """Device, store and scheduler go on, each at its own pace."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        while rank.gpu.step():
            pass
        rank.poll()
        time.sleep(0.001)


def tiers(rank):
    return rank.linker.kinds.full.tier, rank.linker.kinds.beside[0].tier


def test_arena_when_the_pools_have_given_pages_up_then_both_kinds_come_from_it(monkeypatch):
    owner, reader = make_node(monkeypatch, ARENA)
    names = keys(1, 2, 3)
    full, window = publish(owner, names)
    held = owner.content(full, window[-WINDOW_PAGES * PAGE :])
    go_on_until(owner, lambda: all(tier.state()["num_arena_pages"] == 3 for tier in tiers(owner)))
    owner.free(full, window)
    let_the_device_run([owner, reader])
    reader.meet_peers()
    assert reader.lookup(names) == [3]
    own = reader.load(names)
    assert reader.land()
    let_the_device_run([owner, reader])
    assert equal(reader.content(*own), held)


def test_demote_when_there_are_windows_then_of_them_the_page_at_the_end_of_the_prefix_goes_last(monkeypatch):
    (rank,) = make_node(monkeypatch, ARENA, num_ranks=1)
    names = keys(1, 2, 3)
    publish(rank, names)
    go_on_until(rank, lambda: all(tier.state()["num_arena_pages"] == 3 for tier in tiers(rank)))
    rank.linker.kinds.demote(names)
    gone = []
    for tier in tiers(rank):
        tier.residency.claim(tier.residency.num_free + 1, [], keys(9))
        gone.append(set(names) - set(tier.residency.keys))
    assert gone == [{names[2]}, {names[0]}]


def test_alloc_when_copies_down_hold_the_window_pages_then_it_goes_on_when_the_device_has_made_them(monkeypatch):
    (rank,) = make_node(monkeypatch, ARENA, num_ranks=1)
    full, window = rank.alloc(4, TOKENS // 2 // PAGE)
    rank.offload(keys(*range(1, 5)), full, window[-4 * PAGE :])
    while not rank.linker.pop_completed_offload() if rank.poll() else True:
        assert rank.gpu.step()
    assert any(one.num_under_way for one in rank.linker.kinds.beside[0].access._readers), "it is being backed up"
    rank.free(full, window)
    slept = iter(range(2000))

    def sleep(seconds):
        rank.gpu.step()
        next(slept)

    monkeypatch.setattr(allocator.time, "sleep", sleep)
    with rank.on(rank.schedule):
        assert rank.window.alloc(TOKENS // 2) is not None


@pytest.fixture
def stored(monkeypatch, tmp_path):
    monkeypatch.setattr(rig.identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(rig.module.requests, "prompt_keys", lambda request, page_tokens: keys(1, 2, 3))
    monkeypatch.setattr(rig.module.requests, "is_of_this_server", lambda request: False)
    return Config(min_fetch_tokens=PAGE, host_gb=0.002, store=(str(tmp_path),), store_gb=0.1, store_admit="first")


def store_pages(monkeypatch, config, names):
    """A server writes both kinds to its store, and stops; what was in the pools."""
    (rank,) = make_node(monkeypatch, config, num_ranks=1)
    rank.linker.arrive("learnt")
    full, window = publish(rank, names)
    go_on_until(rank, lambda: rank.linker.counters.archived_pages == 2 * len(names))
    rank.linker.close()
    return rank.content(full, window[-WINDOW_PAGES * PAGE :])


def load_while_it_is_read(rank, names):
    """Where a prompt's pages go, and its batch: the forward has been enqueued."""
    rank.linker.arrive("r")
    assert rank.lookup(names) == [len(names)]
    own = rank.load(names)
    return own, rank.enqueue_forward()


def test_prefix_when_only_the_store_has_it_then_the_copies_of_both_pools_follow_its_reads(monkeypatch, stored):
    names = keys(1, 2, 3)
    content = store_pages(monkeypatch, stored, names)
    (rank,) = make_node(monkeypatch, stored, num_ranks=1)
    own, index = load_while_it_is_read(rank, names)
    followed = {call[1] for call in rank.driver.calls if call[0] == "wait_flag"}
    assert {one._follow_stream for one in accesses(rank)} <= followed, "each pool's copies wait for words, on a stream"
    assert not equal(rank.content(*own), content)
    assert rank.finish(index)
    go_on_until(rank, lambda: rank.linker.counters.read_pages == len(names) + WINDOW_PAGES)
    assert equal(rank.content(*own), content)
    rank.linker.close()


@pytest.mark.parametrize("number", [0, 1], ids=["one kind", "the other kind"])
def test_prefix_when_stored_pages_of_one_kind_are_damaged_then_the_batch_fails(monkeypatch, stored, tmp_path, number):
    names = keys(1, 2, 3)
    store_pages(monkeypatch, stored, names)
    shelves = sorted(tmp_path.glob("shelf-*"))
    assert len(shelves) == 2
    damage(shelves[number])
    (rank,) = make_node(monkeypatch, stored, num_ranks=1)
    _, index = load_while_it_is_read(rank, names)
    assert not rank.finish(index)
    go_on_until(rank, lambda: not rank.linker.cache._ending)
    assert rank.linker.counters.read_failed_pages > 0
    rank.linker.close()


# ---- a device that refuses


def test_batch_when_the_copies_of_windows_are_refused_then_it_fails_and_nothing_is_leased_any_more(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    full, window = publish(owner, names)
    assert reader.lookup(names) == [2]
    assert reader.load(names) is not None
    reader.driver.refuse["kernel"] = len(FULL)
    assert not reader.finish(reader.start())
    reader.driver.refuse.clear()
    let_the_device_run(ranks)
    assert reader.load(names, "s") is None
    owner.free(full, window)
    let_the_device_run(ranks)
    assert owner.full._num_held == 0 and owner.window._num_held == 0


def test_pools_when_they_lie_in_one_allocation_then_each_is_opened_and_closed_by_itself(monkeypatch):
    owner, reader = ranks = make_node(monkeypatch, PLAIN, adopt=in_one_allocation)
    assert max(reader.driver.num_openings.values()) == 2, "once for each pool"
    names = keys(1, 2)
    full, window = publish(owner, names)
    assert reader.lookup(names) == [2]
    own = reader.load(names)
    assert reader.land()
    let_the_device_run(ranks)
    assert equal(reader.content(*own), owner.content(full, window))
    with reader.on(reader.schedule):
        reader.linker.weights_changed()
    reader.gpu.opener.run()
    assert not reader.driver.mapped


def test_streams_when_the_driver_makes_partitions_then_both_pools_copy_in_one(monkeypatch):
    made = []

    def create(driver, num_sms, num_streams):
        made.append(num_streams)
        return [driver.create_stream() for _ in range(num_streams)], num_sms

    monkeypatch.setattr(WindowDevice, "create_partition_streams", create)
    (rank,) = make_node(monkeypatch, PLAIN, num_ranks=1)
    assert made == [4]
    full, window = accesses(rank)
    assert len({full._copy_stream, full._follow_stream, window._copy_stream, window._follow_stream}) == 4
