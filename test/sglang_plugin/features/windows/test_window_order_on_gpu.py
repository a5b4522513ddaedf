# SPDX-License-Identifier: Apache-2.0
"""Two pools on a GPU, with the fake driver: every order that the calls allow, and each wait is shown to be needed."""

import pytest
from test.sglang_plugin.features.windows.window_gpu import (
    NUM_LAYERS,
    PAGE,
    PLAIN,
    POISON,
    TOKENS,
    WINDOW_PAGES,
    accesses,
    equal,
    let_the_device_run,
    make_node,
    publish,
)
from test.unit.directory.rig import keys

from banyan.sglang_plugin.pools.device_offloads import DeviceOffloads

SEEDS = range(40)


@pytest.fixture
def ranks(monkeypatch):
    return make_node(monkeypatch, PLAIN)


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
    pages = reader.linker.kinds.beside[0].pages
    pages._reached = [(window, full) for full, window in pages._reached]


def windows_are_not_waited_for(reader):
    pages = reader.linker.kinds.beside[0].pages
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
        # An allocation that is short of pages asks for those that are on their way; or a scheduling step does.
        if owner.gpu.random.random() < 0.2:
            owner.gpu.random.choice([owner.window.poll, owner.poll])()
    owner.poll()
    assert len(owner.window.free_pages) == TOKENS // 2 // PAGE, "they may be handed out"
    return reader.lookup(names, "s") != []


def test_window_when_it_is_freed_while_it_is_being_offered_then_nobody_finds_it(monkeypatch):
    assert not any(is_found_after_it_was_freed(monkeypatch, seed, lambda owner: None) for seed in SEEDS)


def withdraw_first(owner):
    """What was freed overtakes what was offered."""
    order = owner.linker.kinds.full.access._rank_device.order

    def take():
        for sender in sorted(set(order._senders), key=lambda one: isinstance(one, DeviceOffloads)):
            while sender in order._senders and sender.take_next():
                order._senders.remove(sender)

    order.take = take


def test_window_when_freed_pages_overtake_what_was_offered_then_some_interleaving_shows_it(monkeypatch):
    assert any(is_found_after_it_was_freed(monkeypatch, seed, withdraw_first) for seed in SEEDS)
