# SPDX-License-Identifier: Apache-2.0
"""I/O in stream order: the ring's real thread and files, a fake device that rings and waits."""

import time

import numpy as np
import pytest
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu

from banyan._native import FlagRing, SharedBytes
from banyan.transport.cuda_ipc.gpu_io import GpuIo

COMPUTE, COPY = 1, 2
NUM_LAYERS, LAYER_BYTES, NUM_PAGES = 3, 64, 2


class Rig:
    def __init__(self, tmp_path, first=0):
        self.gpu = FakeGpu()
        self.driver = FakeDriver(self.gpu)
        self.words = SharedBytes.create(2 * FlagRing.SLOT_BYTES, "ring")
        self.ring = FlagRing(self.words, 2, first)
        self.frames = SharedBytes.create(NUM_PAGES * NUM_LAYERS * LAYER_BYTES, "frames")
        self.bytes = np.frombuffer(self.frames, dtype=np.uint8)
        address = np.frombuffer(self.words, dtype=np.uint8).ctypes.data
        self.io = GpuIo(self.driver, self.ring, address)
        self.content = np.random.default_rng(0).integers(1, 256, self.bytes.size, dtype=np.uint8)
        self.path = tmp_path / "pages"
        self.path.write_bytes(self.content.tobytes())

    def batch(self, file_bytes=None):
        """Layer l of each page: Full Blocks in the file and in memory."""
        block = NUM_LAYERS * LAYER_BYTES
        offsets = [[page * block + layer * LAYER_BYTES for page in range(NUM_PAGES)] for layer in range(NUM_LAYERS)]
        layers = [[(0, offset, LAYER_BYTES, offset) for offset in layer] for layer in offsets]
        with self.path.open("r+b") as file:
            if file_bytes is not None:
                file.truncate(file_bytes)
            return self.ring.read([file.fileno()], layers, self.frames)

    def layer(self, array, layer):
        return array.reshape(NUM_PAGES, NUM_LAYERS, LAYER_BYTES)[:, layer].tobytes()

    def run(self, seconds=5.0):
        """Let the device run; the ring's thread answers at its own pace."""
        deadline = time.monotonic() + seconds
        while any(self.gpu.streams.values()):
            assert time.monotonic() < deadline, "a stream waits for ever"
            if not self.gpu.step():
                time.sleep(0.0005)


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def enqueue_forward(rig, batch, seen):
    """A forward that asks one layer ahead, on a compute stream, and reads each layer behind its answer."""
    rig.io.ask(COMPUTE, batch, 0)
    for layer in range(NUM_LAYERS):
        rig.io.wait(COMPUTE, batch, layer)
        rig.gpu.enqueue(COMPUTE, lambda layer=layer: seen.append(rig.layer(rig.bytes, layer)))
        if layer + 1 < NUM_LAYERS:
            rig.io.ask(COMPUTE, batch, layer + 1)
    return rig.io.finish(COMPUTE, batch)


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_forward_when_layers_are_on_disk_then_each_is_read_behind_its_answer(tmp_path, first):
    rig = Rig(tmp_path, first)
    for _ in range(3):
        rig.bytes[:] = 0
        seen = []
        batch = rig.batch()
        assert enqueue_forward(rig, batch, seen)
        rig.run()
        assert seen == [rig.layer(rig.content, layer) for layer in range(NUM_LAYERS)]
        until(lambda batch=batch: batch.has_ended)
        assert not batch.has_failed
        rig.io.poll()
        assert rig.io.num_under_way == 0


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_layer_when_the_device_has_not_reached_it_then_nothing_is_read(rig):
    batch = rig.batch()
    rig.io.ask(COMPUTE, batch, 0)
    rig.run()
    until(lambda: rig.layer(rig.bytes, 0) == rig.layer(rig.content, 0))
    time.sleep(0.01)
    assert not rig.layer(rig.bytes, 1).strip(b"\0")
    batch.cancel()


def test_forward_when_the_file_is_short_then_no_stream_hangs_and_the_batch_says_so(rig):
    batch = rig.batch(file_bytes=NUM_LAYERS * LAYER_BYTES + LAYER_BYTES + 1)
    enqueue_forward(rig, batch, [])
    rig.run()
    until(lambda: batch.has_ended)
    assert batch.has_failed


def test_slot_when_the_device_is_not_past_it_then_it_is_not_given_back(rig):
    batch = rig.batch()
    gate = []
    rig.gpu.enqueue(COMPUTE, lambda: None, lambda: bool(gate))
    enqueue_forward(rig, batch, [])
    batch.cancel()
    until(lambda: batch.has_ended)
    rig.io.poll()
    assert rig.io.num_under_way == 1
    other = rig.batch()
    assert other is not None and rig.batch() is None
    gate.append(True)
    rig.run()
    rig.io.poll()
    assert rig.io.num_under_way == 0
    assert rig.batch().answer_offset == batch.answer_offset
    other.cancel()


def test_streams_when_the_ring_is_dropped_then_they_go_on(rig):
    batch = rig.batch()
    rig.io.wait(COPY, batch, NUM_LAYERS - 1)
    del rig.ring, rig.io
    rig.run()
    assert batch.has_failed


def test_value_when_the_layer_is_none_of_the_batch_then_valueerror(rig):
    batch = rig.batch()
    with pytest.raises(ValueError, match="layer 3"):
        batch.value(NUM_LAYERS)
    batch.cancel()


def test_words_when_the_ring_is_made_then_doorbells_and_answers_are_lines_apart(rig):
    one, two = rig.batch(), rig.batch()
    offsets = sorted(offset for batch in (one, two) for offset in (batch.doorbell_offset, batch.answer_offset))
    assert offsets == [0, 64, 128, 192]
    for batch in (one, two):
        batch.cancel()
