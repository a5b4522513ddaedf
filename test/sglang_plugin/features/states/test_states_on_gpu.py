# SPDX-License-Identifier: Apache-2.0
"""A model with states on a GPU, with the fake driver: pages and the state at their end from a peer, the arena and the
store; every order that the calls allow, and each wait is shown to be needed."""

import time

import pytest
import torch
from test.sglang_plugin.features.states.state_gpu import PAGE, TOKENS, make_node
from test.sglang_plugin.features.states.test_state_places import NUM_LAYERS, NUM_STATES
from test.sglang_plugin.features.windows.test_window_order_on_gpu import (
    SEEDS,
    copies_do_not_wait,
    drop_waits,
    leases_end_early,
)
from test.sglang_plugin.features.windows.window_gpu import PLAIN, POISON, accesses, equal, let_the_device_run, publish
from test.sglang_plugin.rank import test_linker as rig
from test.unit.directory.rig import keys

from banyan.config import Config
from banyan.features.states.pools.state_pool import DeviceSlots
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool


@pytest.fixture
def ranks(monkeypatch):
    return make_node(monkeypatch, PLAIN)


def test_pool_when_states_lie_on_a_gpu_then_they_are_upstreams_own_and_described(ranks):
    rank = ranks[0]
    shared = rank.slots.mamba_pool.banyan_states
    assert isinstance(rank.window, DeviceSlots) and shared.banyan_bytes is None
    cache, page = rank.slots.mamba_pool.mamba_cache, shared.banyan_geometry.page
    addresses = [tensor[layer].data_ptr() for layer in range(2) for tensor in (cache.temporal, *cache.conv)]
    assert [address for address, _ in shared.banyan_extents] == addresses
    assert page.page_bytes == sum(tensor[:, 0].nbytes for tensor in (cache.temporal, *cache.conv))
    assert shared.banyan_geometry.num_pages == NUM_STATES + 1


def test_prefix_when_a_peer_has_it_then_pages_and_the_state_come_and_the_scheduler_only_enqueued(ranks):
    owner, reader = ranks
    names = keys(1, 2, 3)
    full, state = publish(owner, names, num_windowed=1)
    assert reader.lookup(names) == [3]
    own = reader.load(names)
    index = reader.enqueue_forward()
    assert not equal(reader.content(*own), owner.content(full, state)), "nothing has run yet"
    let_the_device_run(ranks)
    assert reader.finish(index)
    assert equal(reader.content(*own), owner.content(full, state))


def test_prefix_when_its_end_has_no_state_then_the_longest_that_has_one_is_offered(ranks):
    owner, reader = ranks
    publish(owner, keys(1, 2), num_windowed=1)
    publish(owner, keys(3, 4), num_windowed=0)
    assert reader.lookup(keys(1, 2, 3, 4)) == [2]


def test_slot_when_sglang_writes_over_the_table_that_named_it_then_it_still_comes_back_itself(ranks):
    (owner, _), (_, row) = ranks, ranks[0].alloc(1, 2)
    kept, freed = row.tolist()
    with owner.on(owner.schedule):
        # SGLang frees a part of a table's row, and gives the row to the next request.
        owner.window.free(row[1:])
        row.fill_(kept)
    owner.gpu.run()
    owner.poll()
    free = owner.window.free_slots.tolist()
    assert free.count(freed) == 1 and kept not in free


def test_slots_when_sglang_takes_some_for_its_whole_queue_then_none_that_it_does_not_use_is_away_meanwhile(ranks):
    slots = ranks[0].window
    with ranks[0].on(ranks[0].schedule):
        slots.alloc_group_begin(NUM_STATES - 1)
        slots.alloc_group_end()
    assert len(slots.free_slots) == NUM_STATES


def test_state_when_it_is_freed_under_a_reader_then_its_slot_comes_back_after_the_copy(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    full, state = publish(owner, names, num_windowed=1)
    reader.lookup(names)
    assert reader.load(names) is not None
    index = reader.start()
    owner.free(full, state)
    assert owner.window.available_size() == NUM_STATES
    assert reader.finish(index)
    owner.poll()
    assert int(state) not in owner.window.free_slots.tolist(), "the copy has not run"
    owner.gpu.run()
    deadline_s = time.monotonic() + 5
    while owner.window._num_held and time.monotonic() < deadline_s:
        owner.poll()
    assert sorted(owner.window.free_slots.tolist()) == list(range(1, NUM_STATES + 1))


def test_slot_when_all_are_freed_at_once_then_nobody_finds_a_state_and_all_are_free(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    publish(owner, names, num_windowed=1)
    with owner.on(owner.schedule):
        owner.window.clear()
    assert reader.lookup(names) == [] and owner.window.available_size() == NUM_STATES
    let_the_device_run(ranks)
    assert sorted(owner.window.free_slots.tolist()) == list(range(1, NUM_STATES + 1))


def test_arena_when_the_pool_has_given_the_state_up_then_it_comes_from_there(monkeypatch):
    config = Config(min_fetch_tokens=PAGE, host_gb=0.01, copy_layers_per_launch=1)
    ranks = owner, reader = make_node(monkeypatch, config)
    names = keys(1, 2)
    full, state = publish(owner, names, num_windowed=1)
    held = [layer.clone() for layer in owner.content(full, state)]
    kinds = owner.linker.kinds
    deadline_s = time.monotonic() + 10
    while not (kinds.full.tier.state()["num_arena_pages"] == 2 and kinds.beside[0].tier.state()["num_arena_pages"]):
        assert time.monotonic() < deadline_s
        let_the_device_run(ranks)
    owner.free(full, state)
    let_the_device_run(ranks)
    for part, slots in enumerate((slice(PAGE, TOKENS + PAGE), slice(1, NUM_STATES + 1))):
        owner.enqueue_write(owner.forward, part, slots)
    let_the_device_run(ranks)
    assert reader.lookup(names, "s") == [2]
    own = reader.load(names, "s")
    index = reader.enqueue_forward()
    let_the_device_run(ranks)
    assert reader.finish(index)
    assert equal(reader.content(*own), held)


def draft_of_heads():
    """SGLang's next layer of such a model, at the slots of its full pages."""
    own = {name: value for name, value in rig.POOL.items() if name not in ("size", "layer_num")}
    return (DeviceMHAPool(size=TOKENS, layer_num=1, **own),)


def test_prefix_when_there_is_a_draft_then_its_rows_come_with_the_pages_and_the_state(monkeypatch):
    ranks = owner, reader = make_node(monkeypatch, PLAIN, make_drafts=draft_of_heads)
    names = keys(1, 2)
    full, state = publish(owner, names, num_windowed=1)
    assert reader.lookup(names) == [2]
    own = reader.load(names)
    index = reader.enqueue_forward()
    let_the_device_run(ranks)
    assert reader.finish(index)
    assert equal(reader.content(*own), owner.content(full, state))
    assert torch.equal(rig.page(reader.drafts[0], own[0]), rig.page(owner.drafts[0], full))


# ---- orders


def story(monkeypatch, seed, *, tamper=lambda reader: None):
    """A forward still writes the pages and the state that are offloaded; another one those that are fetched into. The
    next one reads what was fetched, layer by layer, and works on each state in place. The owner frees its slots and
    overwrites each as soon as it may. True when the forward read what the owner had written."""
    owner, reader = ranks = make_node(monkeypatch, PLAIN, seed=seed)
    gpu, names = owner.gpu, keys(1, 2)
    full, state = owner.alloc(2, 1)
    for part, slots in enumerate((full, state)):
        owner.enqueue_write(owner.forward, part, slots, None)
    owner.offload(names, full, state)
    while not reader.lookup(names):
        assert gpu.step()
        owner.poll()
    expected = owner.content(full, state)
    tamper(reader)
    for _ in range(12):  # It takes a while.
        gpu.enqueue(reader.forward, lambda: None)
    for part, size in enumerate((TOKENS, NUM_STATES)):
        reader.enqueue_write(reader.forward, part, slice(0, size))
    own = reader.load(names)
    index, seen = reader.start(), {}
    for layer in range(NUM_LAYERS):
        reader.wait_until(layer)
        gpu.enqueue(reader.forward, lambda layer=layer: seen.update({layer: reader.layer(layer, *own)}))
        for _ in range(gpu.random.randrange(6)):
            gpu.step()
    # The request works on its state from here on.
    reader.enqueue_write(reader.forward, 1, own[1])
    assert reader.finish(index)
    owner.free(full, state)
    overwrite_what_comes_back(ranks, state)
    worked_on = all(bool((tensor == POISON).all()) for tensor in (reader.layer(0, *own), reader.layer(2, *own)))
    return equal([seen[layer] for layer in range(NUM_LAYERS)], expected) and worked_on


def overwrite_what_comes_back(ranks, state):
    owner, reader = ranks
    waiting = set(state.tolist())
    while owner.gpu.step():
        reader.poll()
        owner.poll()
        for slot in waiting & set(owner.window.free_slots.tolist()):
            waiting.discard(slot)
            owner.enqueue_write(owner.forward, 1, torch.tensor([slot]))
    owner.gpu.run()
    reader.poll()
    owner.poll()


def test_fetch_when_streams_interleave_in_any_way_then_every_layer_reads_the_owners_bytes(monkeypatch):
    assert all(story(monkeypatch, seed) for seed in SEEDS)


def forward_does_not_wait(reader):
    drop_waits(reader.driver, {reader.forward}, 0)


def states_are_not_waited_for(reader):
    pages = reader.linker.kinds.beside[0].pages
    pages._reached = [(full, 0) for full, _ in pages._reached]


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(copies_do_not_wait(1), id="copies of states do not wait for the forward in flight"),
        pytest.param(forward_does_not_wait, id="the forward does not wait for its first layer"),
        pytest.param(states_are_not_waited_for, id="layers do not wait for their states"),
        pytest.param(leases_end_early(1), id="leases of states end early"),
    ],
)
def test_story_when_a_wait_is_missing_then_some_interleaving_shows_it(monkeypatch, tamper):
    assert not all(story(monkeypatch, seed, tamper=tamper) for seed in SEEDS)


def test_copy_when_it_is_of_states_then_it_runs_on_streams_of_its_own(ranks):
    full, states = accesses(ranks[0])
    assert full._copy_stream != states._copy_stream
