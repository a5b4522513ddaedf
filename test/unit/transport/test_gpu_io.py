# SPDX-License-Identifier: Apache-2.0
"""Reads in stream order: the ring's real thread, reads that the test feeds, a fake device that waits."""

import time

import numpy as np
import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan._native import Feed, FlagRing, SharedBytes
from banyan.transport.cuda_ipc.gpu_io import GpuIo

COPY = 2
NUM_LAYERS, LAYER_BYTES = 3, 4096


class Rig:
    def __init__(self, first=0, num_slots=2):
        self.gpu, self.reads = FakeGpu(), []
        self.words = SharedBytes.create(num_slots * FlagRing.SLOT_BYTES, "ring")
        self.ring = FlagRing(self.words, num_slots, first)
        self.frames = SharedBytes.create(NUM_LAYERS * LAYER_BYTES, "frames")
        self.bytes = np.frombuffer(self.frames, dtype=np.uint8)
        address = np.frombuffer(self.words, dtype=np.uint8).ctypes.data
        self.io = GpuIo(FakeDriver(self.gpu), self.ring, address, frame_bytes=NUM_LAYERS * LAYER_BYTES)

    def feed(self):
        return Feed(self.frames, np.zeros(1, dtype=np.int64), NUM_LAYERS * LAYER_BYTES, NUM_LAYERS)

    def follow(self, feed):
        # A read that is dropped waits for its end.
        self.reads.append(feed.read())
        return self.io.follow(self.reads[-1:])

    def land(self, feed, layer):
        """The next layer comes: bytes that tell which it is."""
        self.bytes[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES] = layer + 1
        feed.land(LAYER_BYTES, [])

    def enqueue_copy(self, batch, seen):
        """A copy that looks at each layer behind its wait."""
        for layer in range(NUM_LAYERS):
            self.io.wait(COPY, batch, layer)
            self.gpu.enqueue(COPY, lambda layer=layer: seen.append(int(self.bytes[layer * LAYER_BYTES])))
        self.io.finish(COPY, batch)

    def run(self, seconds=5.0):
        """Let the device run; the ring's thread answers at its own pace."""
        deadline = time.monotonic() + seconds
        while any(self.gpu.streams.values()):
            assert time.monotonic() < deadline, "a stream waits for ever"
            if not self.gpu.step():
                time.sleep(0.0005)


@pytest.fixture
def rig():
    return Rig()


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_copy_when_layers_come_then_each_is_read_behind_its_answer(first):
    rig = Rig(first)
    for _ in range(3):
        rig.bytes[:] = 0
        seen, feed = [], rig.feed()
        batch = rig.follow(feed)
        rig.enqueue_copy(batch, seen)
        for layer in range(NUM_LAYERS):
            rig.land(feed, layer)
            until(lambda seen=seen, layer=layer: rig.gpu.step() or len(seen) > layer)
        feed.end()
        rig.run()
        assert seen == [1, 2, 3]
        until(lambda batch=batch: batch.has_ended)
        assert not batch.has_failed
        rig.io.poll()
        assert not rig.io._passed


def test_layer_when_it_has_not_come_then_no_stream_gets_past_its_wait(rig):
    seen, feed = [], rig.feed()
    batch = rig.follow(feed)
    rig.enqueue_copy(batch, seen)
    rig.land(feed, 0)
    until(lambda: rig.gpu.step() or seen)
    time.sleep(0.01)
    while rig.gpu.step():
        pass
    assert seen == [1]
    feed.end()
    rig.run()


def test_copy_when_the_read_ends_early_then_no_stream_hangs_and_the_batch_says_so(rig):
    feed = rig.feed()
    batch = rig.follow(feed)
    rig.enqueue_copy(batch, [])
    rig.land(feed, 0)
    feed.end()
    rig.run()
    until(lambda: batch.has_ended)
    assert batch.has_failed


def test_slot_when_the_device_is_not_past_it_then_it_is_not_given_back(rig):
    gate, feeds = [], [rig.feed() for _ in range(3)]
    batch = rig.follow(feeds[0])
    rig.gpu.enqueue(COPY, lambda: None, lambda: bool(gate))
    rig.enqueue_copy(batch, [])
    feeds[0].end()
    until(lambda: batch.has_ended)
    rig.io.poll()
    assert len(rig.io._passed) == 1
    feeds[2].end()
    assert rig.follow(feeds[1]) is not None and rig.follow(feeds[2]) is None
    gate.append(True)
    rig.run()
    rig.io.poll()
    assert not rig.io._passed
    assert rig.follow(feeds[2]).answer_offset == batch.answer_offset
    for feed in feeds:
        feed.end()


def test_streams_when_the_ring_is_dropped_then_they_go_on(rig):
    feed = rig.feed()
    batch = rig.follow(feed)
    rig.io.wait(COPY, batch, NUM_LAYERS - 1)
    feed.end()
    del rig.ring, rig.io
    rig.run()
    assert batch.has_failed


def test_value_when_the_layer_is_none_of_the_batch_then_valueerror(rig):
    feed = rig.feed()
    with pytest.raises(ValueError, match="layer 3"):
        rig.follow(feed).value(NUM_LAYERS)
    feed.end()


def test_reads_when_there_are_none_then_valueerror(rig):
    with pytest.raises(ValueError, match="no read"):
        rig.io.follow([])


def test_words_when_the_ring_is_made_then_each_has_a_cache_line_of_its_own(rig):
    feeds = [rig.feed() for _ in range(2)]
    assert sorted(rig.follow(feed).answer_offset for feed in feeds) == [0, 64]
    for feed in feeds:
        feed.end()
