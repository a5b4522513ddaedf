# SPDX-License-Identifier: Apache-2.0
"""A model with sliding windows on a GPU, with the fake driver: two pools, copied by kernels, in every order that the
calls allow."""

import time

import pytest
import torch
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.test_linker_on_gpu import damage
from test.sglang_plugin.rank.window_gpu import (
    FULL,
    NUM_LAYERS,
    PAGE,
    POISON,
    TOKENS,
    WINDOW_PAGES,
    WindowDevice,
    in_one_allocation,
    let_the_device_run,
    make_node,
)
from test.unit.directory.rig import keys

from banyan.config import Config
from banyan.sglang_plugin.pools import allocator
from banyan.sglang_plugin.pools.device_offloads import DeviceOffloads

SEEDS = range(40)
PLAIN = Config(min_fetch_tokens=PAGE, host_gb=0.0, copy_layers_per_launch=1)


@pytest.fixture
def ranks(monkeypatch):
    return make_node(monkeypatch, PLAIN)


def publish(rank, names, num_windowed=None):
    """A node whose pages are complete, and where they lie."""
    full, window = rank.alloc(len(names), len(names) if num_windowed is None else num_windowed)
    rank.offload(names, full, window if len(window) else None)
    let_the_device_run([rank])
    assert rank.linker.pop_completed_offload()
    return full, window


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


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
    owner.gpu.run()
    owner.poll()
    assert len(owner.window.free_pages) == TOKENS // 2 // PAGE - 2, "the reader has not settled"
    reader.poll()
    owner.poll()
    assert len(owner.window.free_pages) == TOKENS // 2 // PAGE and len(owner.full.free_pages) == TOKENS // PAGE


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
    assert all(not one.num_under_way for one in reader.linker._access._rank_device.readers)


# ---- in every order


def drop_waits(driver, streams, nth=None):
    """Waits of these streams are not made; ``nth``: the one of them alone."""
    original, count = driver.wait_event, iter(range(10**6))

    def wait_event(stream, event):
        if stream not in streams or (nth is not None and next(count) != nth):
            original(stream, event)

    driver.wait_event = wait_event


def story(monkeypatch, seed, *, tamper=lambda reader: None, waits=tuple(range(NUM_LAYERS))):
    """A forward still writes the pages that are offloaded; another one those that are fetched into. The next one reads
    what was fetched, layer by layer, or waits for ``waits`` only and reads then, as a graph does; but for a page of
    either pool: its request was aborted, it is freed and overwritten. The owner frees its pages, and overwrites each as
    soon as it may. True when the forward read what the owner had written, and the late write was the last."""
    owner, reader = ranks = make_node(monkeypatch, PLAIN, seed=seed)
    gpu, names = owner.gpu, keys(1, 2, 3)
    full, window = owner.alloc(3, 3)
    for part, slots in enumerate((full, window)):
        owner.enqueue_write(owner.forward, part, slots, None)
    owner.offload(names, full, window)
    while not reader.lookup(names):
        assert gpu.step()
        owner.poll()
    # A lookup is kept until the peer's pages change, and the two kinds are published at once.
    expected = owner.content(full[PAGE:], window[-(WINDOW_PAGES - 1) * PAGE :])
    tamper(reader)
    for _ in range(12):  # It takes a while.
        gpu.enqueue(reader.forward, lambda: None)
    for part in (0, 1):
        reader.enqueue_write(reader.forward, part, slice(0, TOKENS // (part + 1)))
    own = reader.load(names)
    rest = [slots[PAGE:] for slots in own]
    index, seen = reader.start(), {}
    for layer in waits:
        reader.wait_until(layer)
        for behind in range(NUM_LAYERS) if len(waits) == 1 else (layer,):
            gpu.enqueue(reader.forward, lambda layer=behind: seen.update({layer: reader.layer(layer, *rest)}))
        for _ in range(gpu.random.randrange(6)):
            gpu.step()
    assert reader.finish(index)
    for part, slots in enumerate(own):
        reader.enqueue_write(reader.schedule, part, slots[:PAGE])
    owner.free(full, window)
    overwrite_what_comes_back(ranks, (full, window))
    untouched = all(bool((layer == POISON).all()) for layer in reader.content(*(slots[:PAGE] for slots in own)))
    return equal([seen[layer] for layer in range(NUM_LAYERS)], expected) and untouched


def overwrite_what_comes_back(ranks, freed):
    owner, reader = ranks
    waiting = [{int(slot) // PAGE for slot in slots} for slots in freed]
    while owner.gpu.step():
        reader.poll()
        owner.poll()
        for part, pages in enumerate((owner.full, owner.window)):
            for page in waiting[part] & set(pages.free_pages.tolist()):
                waiting[part].discard(page)
                owner.enqueue_write(owner.forward, part, slice(page * PAGE, (page + 1) * PAGE))
    owner.gpu.run()
    reader.poll()
    owner.poll()


def test_fetch_when_streams_interleave_in_any_way_then_every_layer_reads_the_owners_bytes(monkeypatch):
    assert all(story(monkeypatch, seed) for seed in SEEDS)


def test_fetch_when_a_forward_waits_for_its_last_layer_alone_then_both_pools_are_there(monkeypatch):
    """So does one that is replayed as a graph."""
    assert all(story(monkeypatch, seed, waits=(NUM_LAYERS - 1,)) for seed in SEEDS)


def accesses(rank):
    return rank.linker._access, rank.linker._windows.member.access


def copies_do_not_wait(part):
    def tamper(reader):
        drop_waits(reader.driver, {accesses(reader)[part]._copy_stream})

    return tamper


def forward_does_not_wait(nth):
    def tamper(reader):
        drop_waits(reader.driver, {reader.forward}, nth)

    return tamper


def what_follows_does_not_wait(reader):
    drop_waits(reader.driver, {reader.schedule})


def layers_are_looked_for_in_the_other_pool(reader):
    pages = reader.linker._windows.pages
    pages._reached = [(window, full) for full, window in pages._reached]


def windows_are_not_waited_for(reader):
    pages = reader.linker._windows.pages
    pages._reached = [(full, 0) for full, _ in pages._reached]


def leases_end_early(part):
    def tamper(reader):
        for one in accesses(reader)[part]._readers:
            original = one.start_copy

            def start_copy(loads, arrivals=(), original=original):
                copy = original(loads, arrivals)
                for lease, _ in loads:
                    lease.release()
                return copy

            one.start_copy = start_copy

    return tamper


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(copies_do_not_wait(0), id="full copies do not wait for the forward in flight"),
        pytest.param(copies_do_not_wait(1), id="window copies do not wait for the forward in flight"),
        pytest.param(forward_does_not_wait(0), id="the forward does not wait for its first layer"),
        pytest.param(forward_does_not_wait(NUM_LAYERS - 1), id="the forward does not wait for its last layer"),
        pytest.param(windows_are_not_waited_for, id="window layers wait for nothing"),
        pytest.param(layers_are_looked_for_in_the_other_pool, id="layers wait for the copy of the other pool"),
        pytest.param(what_follows_does_not_wait, id="what follows does not wait for the end of the copies"),
        pytest.param(leases_end_early(0), id="leases of full pages end early"),
        pytest.param(leases_end_early(1), id="leases of window pages end early"),
    ],
)
def test_story_when_a_wait_is_missing_then_some_interleaving_shows_it(monkeypatch, tamper):
    assert not all(story(monkeypatch, seed, tamper=tamper) for seed in SEEDS)


# ---- a window in the middle


def fill(owner, names):
    """A tombstone gets its window: where its pages lie."""
    full, _ = publish(owner, names, num_windowed=0)
    with owner.on(owner.schedule):
        window = owner.window.alloc(len(names) * PAGE)
    return full, window


def test_window_when_a_tombstone_has_been_filled_then_it_is_offered_and_sglang_is_not_told(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    full, window = fill(owner, names)
    assert reader.lookup(names) == []
    owner.offer_again(names, full, window)
    assert reader.lookup(names, "s") == []
    let_the_device_run(ranks)
    assert owner.poll() == 0 and reader.lookup(names, "t") == [2]
    own = reader.load(names, "t")
    assert reader.land()
    let_the_device_run(ranks)
    assert equal(reader.content(*own), owner.content(full, window))


def is_found_after_it_was_freed(monkeypatch, seed, tamper):
    """A filled window is offered while a forward runs, and freed at once: nobody holds it."""
    owner, reader = make_node(monkeypatch, PLAIN, seed=seed)
    names = keys(1, 2)
    full, window = fill(owner, names)
    for _ in range(6):
        owner.gpu.enqueue(owner.forward, lambda: None)
    owner.offer_again(names, full, window)
    owner.free(full[:0], window)
    tamper(owner)
    while owner.gpu.step():
        # An allocation that is short of pages asks for those that are on their way, and for nothing else.
        owner.window.poll()
        if owner.gpu.random.random() < 0.2:
            owner.poll()
    owner.poll()
    assert len(owner.window.free_pages) == TOKENS // 2 // PAGE, "they may be handed out"
    return reader.lookup(names, "s") != []


@pytest.fixture
def overtaking(monkeypatch):
    monkeypatch.setattr(DeviceOffloads, "before_frees", lambda offloads: [])


def test_window_when_it_is_freed_while_it_is_being_offered_then_nobody_finds_it(monkeypatch):
    assert not any(is_found_after_it_was_freed(monkeypatch, seed, lambda owner: None) for seed in SEEDS)


def test_window_when_freed_pages_overtake_what_was_offered_then_some_interleaving_shows_it(monkeypatch, overtaking):
    assert any(is_found_after_it_was_freed(monkeypatch, seed, lambda owner: None) for seed in SEEDS)


def test_window_when_it_is_withdrawn_before_it_is_published_then_some_interleaving_shows_it(monkeypatch):
    def forget_to_publish(owner):
        owner.window._settle = lambda: None

    assert any(is_found_after_it_was_freed(monkeypatch, seed, forget_to_publish) for seed in SEEDS)


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
    return rank.linker._member.tier, rank.linker._windows.member.tier


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


def test_alloc_when_copies_down_hold_the_window_pages_then_it_goes_on_when_the_device_has_made_them(monkeypatch):
    (rank,) = make_node(monkeypatch, ARENA, num_ranks=1)
    full, window = rank.alloc(4, TOKENS // 2 // PAGE)
    rank.offload(keys(*range(1, 5)), full, window[-4 * PAGE :])
    while not rank.linker.pop_completed_offload() if rank.poll() else True:
        assert rank.gpu.step()
    assert any(one.num_under_way for one in rank.linker._windows.member.access._readers), "it is being backed up"
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
    monkeypatch.setattr(rig.identity, "weights_digest", lambda path, revision: "weights")
    monkeypatch.setattr(rig.module.requests, "prompt_keys", lambda rid, page_tokens: keys(1, 2, 3))
    monkeypatch.setattr(rig.module.requests, "is_of_this_server", lambda rid: False)
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
    index = rank.start()
    for layer in range(NUM_LAYERS):
        rank.wait_until(layer)
    return own, index


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
    go_on_until(rank, lambda: not rank.linker._cache._ending)
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
