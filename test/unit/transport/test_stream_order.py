# SPDX-License-Identifier: Apache-2.0
"""Order on the device, under every interleaving that some seed finds; and each wait is shown to be needed."""

import pytest
from test.unit.directory.rig import frames, ids, key
from test.unit.transport.gpu_node import EXTENTS, NUM_LAYERS, PAGE_BYTES, make_node

SEEDS = range(40)
POISON = b"\xee" * PAGE_BYTES


def story(seed, layers_per_launch=1, tamper=lambda reader: None):
    """A page that a forward pass still writes is freed and handed out as a fetch's target. The next forward reads the
    fetched pages layer by layer, but one: its request was aborted, it is freed and overwritten. The owner overwrites
    its pages as soon as it may. True when the forward read the owner's bytes and the late write was the last."""
    gpu, owner, reader = make_node(seed, layers_per_launch)
    tamper(reader)
    names = [key(1), key(2), key(3)]
    owner.publish([5, 6, 7], names)
    lease = reader.lease(names)
    reader.enqueue_write(reader.forward, 3, POISON)
    targets = reader.targets(3, 4, 2)
    copy = reader.source.start_copy([(lease, targets)])
    seen = {}
    for layer in range(NUM_LAYERS):
        copy.wait_layer(layer)
        for extent in (2 * layer, 2 * layer + 1):
            gpu.enqueue(reader.forward, lambda e=extent: seen.update({e: (reader.get(3, e), reader.get(4, e))}))
        for _ in range(gpu.random.randrange(4)):
            gpu.step()
    assert copy.finish()
    expected = {extent: (owner.get(5, extent), owner.get(6, extent)) for extent in range(EXTENTS)}
    reader.enqueue_write(reader.schedule, 2, POISON)
    waiting = ids(owner.frame_table.retire(frames(5, 6, 7)))
    while gpu.step():
        reader.source.poll()
        for page in waiting + ids(owner.frame_table.drain()):
            owner.enqueue_write(owner.forward, page, POISON)
        waiting = []
    gpu.run()
    untouched = all(reader.get(2, extent) == POISON for extent in range(EXTENTS))
    return seen == expected and untouched


@pytest.mark.parametrize("layers_per_launch", [1, 2, 8])
def test_fetch_when_streams_interleave_in_any_way_then_the_forward_reads_the_owners_bytes(layers_per_launch):
    assert all(story(seed, layers_per_launch) for seed in SEEDS)


def drop_waits(stream_name, nth=None):
    def tamper(reader):
        driver, stream = reader.driver, getattr(reader, stream_name)
        original, count = driver.wait_event, iter(range(10**6))

        def wait_event(on, event):
            if on != stream or (nth is not None and next(count) != nth):
                original(on, event)

        driver.wait_event = wait_event

    return tamper


def events_are_done(reader):
    reader.driver.is_event_done = lambda event: True
    reader.driver.elapsed_s = lambda first, last: 0.0


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(drop_waits("copy_stream"), id="copy stream does not wait for the forward in flight"),
        pytest.param(drop_waits("forward", nth=0), id="forward does not wait for its first layer"),
        pytest.param(drop_waits("forward", nth=2), id="forward does not wait for its last layer"),
        pytest.param(drop_waits("schedule"), id="what follows does not wait for the end of the copy"),
        pytest.param(events_are_done, id="leases are given back early"),
    ],
)
def test_story_when_a_wait_is_missing_then_some_interleaving_shows_it(tamper):
    assert not all(story(seed, tamper=tamper) for seed in SEEDS)


def test_start_copy_when_called_then_the_calls_are_in_this_order():
    _, owner, reader = make_node()
    owner.publish([5], [key(1)])
    lease = reader.lease([key(1)])
    reader.driver.calls.clear()
    copy = reader.source.start_copy([(lease, reader.targets(3))])
    assert reader.driver.names() == [
        *("record_event", "record_event"),
        *("wait_event", "wait_event"),
        *("copy_async", "copy_async"),
        *("create_event", "record_event"),
        *("kernel", "create_event", "record_event") * NUM_LAYERS,
        "write_word",
    ]
    assert {call[1] for call in reader.driver.calls if call[0] == "wait_event"} == {reader.copy_stream}
    assert [call[2] for call in reader.driver.calls if call[0] == "kernel"] == [range(0, 2), range(2, 4), range(4, 6)]
    reader.driver.calls.clear()
    copy.wait_layer(0)
    copy.wait_layer(0)
    copy.finish()
    assert [call[:2] for call in reader.driver.calls] == [
        ("wait_event", reader.forward),
        ("wait_event", reader.schedule),
        ("wait_event", reader.forward),
    ]


def test_wait_layer_when_only_the_last_is_asked_for_then_one_wait_covers_all():
    _, owner, reader = make_node()
    owner.publish([5], [key(1)])
    copy = reader.source.start_copy([(reader.lease([key(1)]), reader.targets(3))])
    reader.driver.calls.clear()
    copy.wait_layer(NUM_LAYERS - 1)
    copy.wait_layer(0)
    assert [call[:2] for call in reader.driver.calls] == [("wait_event", reader.forward)]


def test_wait_layer_when_the_batch_has_landed_then_no_call_is_made():
    gpu, owner, reader = make_node()
    owner.publish([5], [key(1)])
    copy = reader.source.start_copy([(reader.lease([key(1)]), reader.targets(3))])
    gpu.run()
    reader.source.poll()
    reader.driver.calls.clear()
    copy.wait_layer(0)
    assert copy.finish() and not reader.driver.calls
