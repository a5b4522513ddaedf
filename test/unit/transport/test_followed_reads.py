# SPDX-License-Identifier: Apache-2.0
"""Pages that go up from the store layer by layer: the host's reads and the device's copies in every order that is
allowed, and each wait is shown to be needed."""

import ctypes
from array import array

import pytest
from test.unit.directory.rig import frames, ids, key
from test.unit.transport.fake_gpu import FakeGpu
from test.unit.transport.gpu_node import EXTENTS, FRAME_BYTES, NUM_LAYERS, NUM_PAGES, PAGE_BYTES, GpuRank

from banyan import _native
from banyan.transport.cuda_ipc import copies
from banyan.transport.cuda_ipc.gpu_io import GpuIo

SEEDS = range(40)
HOST = 99
POISON = b"\xee" * PAGE_BYTES


class Read:
    """Pages of the store on their way into frames of the arena, one layer after the other, on the stream ``HOST``."""

    def __init__(self, rank, places, *, good_layers=NUM_LAYERS):
        self.rank, self.places, self.good_layers = rank, places, good_layers
        self.layers_done, self.has_ended, self.is_late = 0, False, False
        for layer in range(good_layers):
            for place in places:
                for extent in (2 * layer, 2 * layer + 1):
                    rank.gpu.enqueue(HOST, lambda p=place, e=extent: put(rank, p, e, stored(p, e)))
            rank.gpu.enqueue(HOST, lambda done=layer + 1: setattr(self, "layers_done", done))
        rank.gpu.enqueue(HOST, lambda: setattr(self, "has_ended", True))

    def offsets(self, positions):
        return array("q", [self.places[position] * FRAME_BYTES for position in positions]).tobytes()


def put(rank, place, extent, data):
    ctypes.memmove(rank.arena + place * FRAME_BYTES + extent * PAGE_BYTES, data, PAGE_BYTES)


def stored(place, extent):
    return bytes([50 + place, extent] * (PAGE_BYTES // 2))


class Batch:
    answer_offset = 64
    has_ended = has_failed = False

    def value(self, layer):
        return layer + 1


class Ring:
    """What ``FlagRing`` does, by operations of the stream ``HOST``: its thread is only one more thing that may lag."""

    def __init__(self, gpu, num_slots=1):
        self.gpu, self.num_slots = gpu, num_slots
        self.words = gpu.allocate(128)
        self.answer = ctypes.c_uint32.from_address(self.words + 64)

    def follow(self, reads):
        if self.num_slots == 0:
            return None
        self.num_slots -= 1
        batch = Batch()

        def answer():
            done = min(read.layers_done for read in reads)
            batch.has_failed = done < NUM_LAYERS and all(read.has_ended for read in reads)
            self.answer.value = NUM_LAYERS if batch.has_failed else done
            batch.has_ended = batch.has_failed or done == NUM_LAYERS
            if not batch.has_ended:
                self.gpu.enqueue(HOST + 1, answer)

        self.gpu.enqueue(HOST + 1, answer)
        return batch

    def give_back(self, batch):
        self.num_slots += batch.has_ended
        return batch.has_ended


class Node:
    def __init__(self, seed=0, layers_per_launch=1, num_slots=1):
        self.gpu = FakeGpu(seed)
        rank_table = _native.RankTable.create(2)
        self.owner = GpuRank(self.gpu, rank_table, 0)
        self.ring = Ring(self.gpu, num_slots)
        self.reader = GpuRank(self.gpu, rank_table, 1, layers_per_launch, self.make_reads)
        self.reader.meet_peers()

    def make_reads(self, rank):
        self.io = GpuIo(rank.driver, self.ring, self.ring.words, frame_bytes=FRAME_BYTES)
        return self.io


@pytest.fixture(autouse=True)
def time_passes(monkeypatch):
    """Whoever waits for the host lets the world go on."""
    worlds = []
    monkeypatch.setattr(copies.time, "sleep", lambda _seconds: worlds[-1].step())
    return worlds


def story(worlds, seed, layers_per_launch=1, tamper=lambda node: None, leave_when=lambda copy: copy.has_ended):
    """A page of a peer and two that are still being read, from the frames 4 and 1 of the arena, go to the pages 3, 0
    and 6. The frames are used for others as soon as they may be. True when the forward read what it should."""
    node = Node(seed, layers_per_launch)
    gpu, owner, reader = node.gpu, node.owner, node.reader
    worlds.append(gpu)
    tamper(node)
    owner.publish([5], [key(1)])
    lease, read = reader.lease([key(1)]), Read(reader, [2, 4, 1])
    copy = reader.source.start_copy([(lease, reader.targets(3))], [(read, [1, 2], reader.targets(0, 6))])
    seen = {}

    def look(extent):
        seen[extent] = [reader.get(page, extent) for page in (3, 0, 6)]

    for layer in range(NUM_LAYERS):
        copy.wait_layer(layer)
        for extent in (2 * layer, 2 * layer + 1):
            gpu.enqueue(reader.forward, lambda extent=extent: look(extent))
        for _ in range(gpu.random.randrange(8)):
            gpu.step()
    assert copy.finish()
    has_left = False
    while gpu.step():
        reader.source.poll()
        if not has_left and leave_when(copy):
            has_left = True
            for place in (4, 1):
                for extent in range(EXTENTS):
                    gpu.enqueue(HOST, lambda p=place, e=extent: put(reader, p, e, POISON))
    gpu.run()
    node.io.poll()
    assert not node.io._passed
    expected = {e: [owner.get(5, e), stored(4, e), stored(1, e)] for e in range(EXTENTS)}
    return seen == expected


@pytest.mark.parametrize("layers_per_launch", [1, 2, 8])
def test_copy_when_reads_and_streams_interleave_in_any_way_then_the_forward_reads_what_was_stored(
    time_passes, layers_per_launch
):
    assert all(story(time_passes, seed, layers_per_launch) for seed in SEEDS)


def no_flag_waits(node):
    node.reader.driver.wait_flag = lambda stream, address, value: None


def one_layer_short(node):
    original = node.reader.driver.wait_flag
    node.reader.driver.wait_flag = lambda stream, address, value: original(stream, address, value - 1)


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param({"tamper": no_flag_waits}, id="the copy stream does not wait for the reads"),
        pytest.param({"tamper": one_layer_short}, id="it waits for the layer before"),
        pytest.param({"leave_when": lambda copy: True}, id="frames are let go when the copy is finished on the host"),
    ],
)
def test_story_when_a_wait_is_missing_then_some_interleaving_shows_it(time_passes, missing):
    assert not all(story(time_passes, seed, **missing) for seed in SEEDS)


@pytest.mark.parametrize("layers_per_launch", [1, 2, 8])
def test_start_copy_when_it_follows_then_each_launch_waits_for_its_last_layer(layers_per_launch):
    node = Node(0, layers_per_launch)
    reader = node.reader
    reader.source.start_copy([], [(Read(reader, [2]), [0], reader.targets(1))])
    waits = [call[3] for call in reader.driver.calls if call[0] == "wait_flag"]
    assert waits == [
        min(NUM_LAYERS, end) for end in range(layers_per_launch, NUM_LAYERS + layers_per_launch, layers_per_launch)
    ]
    names = [name for name in reader.driver.names() if name in ("wait_flag", "kernel")]
    assert names == ["wait_flag", "kernel"] * len(waits)


def test_read_when_it_ends_early_then_no_stream_hangs_and_the_batch_fails(time_passes):
    node = Node()
    time_passes.append(node.gpu)
    reader = node.reader
    copy = reader.source.start_copy([], [(Read(reader, [2], good_layers=1), [0], reader.targets(1))])
    assert not copy.finish()
    node.gpu.run()
    reader.source.poll()
    assert copy.has_ended and reader.source.num_under_way == 0


def test_start_copy_when_every_slot_is_taken_then_the_reads_are_waited_for(time_passes):
    node = Node(num_slots=0)
    time_passes.append(node.gpu)
    reader, read = node.reader, Read(node.reader, [2])
    copy = reader.source.start_copy([], [(read, [0], frames(1))])
    assert read.has_ended and "wait_flag" not in reader.driver.names() and copy.finish()
    node.gpu.run()
    assert [reader.get(1, extent) for extent in range(EXTENTS)] == [stored(2, extent) for extent in range(EXTENTS)]


class Hung(Read):
    """Its device has not answered, and never does."""

    def __init__(self, rank, places):
        self.places, self.layers_done, self.has_ended, self.is_late = places, 0, False, False
        rank.gpu.enqueue(HOST, lambda: setattr(self, "is_late", True))

    def finish(self):
        raise AssertionError("waits for the device")


def test_start_copy_when_every_slot_is_taken_and_a_read_is_late_then_its_device_is_not_waited_for(time_passes):
    node = Node(num_slots=0)
    time_passes.append(node.gpu)
    reader, read = node.reader, Hung(node.reader, [2])
    reader.source.start_copy([], [(read, [0], frames(1))])
    assert read.is_late and not read.has_ended


def test_start_copy_when_more_is_under_way_than_there_is_room_then_the_batch_fails_and_the_next_does_not(
    time_passes, caplog
):
    node = Node(num_slots=4)
    time_passes.append(node.gpu)
    reader, read = node.reader, Read(node.reader, range(NUM_PAGES))
    everything = [(read, list(range(NUM_PAGES)), frames(*range(NUM_PAGES)))]
    copied = [reader.source.start_copy([], everything) for _ in range(3)]
    assert [copy.finish() for copy in copied] == [True, True, False]
    assert "too many are under way" in caplog.text
    node.gpu.run()
    reader.source.poll()
    assert reader.source.num_under_way == 0
    assert reader.source.start_copy([], everything).finish()


def test_start_copy_when_a_call_was_refused_before_then_the_batch_fails(time_passes, caplog):
    node = Node(num_slots=2)
    time_passes.append(node.gpu)
    reader, read = node.reader, Read(node.reader, [2])
    reader.driver.refuse["wait_flag"] = 1
    assert not reader.source.start_copy([], [(read, [0], frames(1))]).finish()
    assert "sharing is off" in caplog.text
    reader.driver.calls.clear()
    assert not reader.source.start_copy([], [(read, [0], frames(1))]).finish()
    assert "kernel" not in reader.driver.names() and "refused before" in caplog.text
    node.gpu.run()


def test_start_copy_when_nothing_can_be_followed_then_valueerror():
    gpu = FakeGpu()
    rank = GpuRank(gpu, _native.RankTable.create(2), 0)
    with pytest.raises(ValueError, match="cannot be followed"):
        rank.source.start_copy([], [(Read(rank, [2]), [0], frames(1))])


def test_lease_when_a_drive_does_not_answer_then_it_ends_with_its_own_copy_and_so_do_later_ones(time_passes):
    node = Node()
    gpu, owner, reader = node.gpu, node.owner, node.reader
    time_passes.append(gpu)
    drive_answers = []
    gpu.enqueue(HOST, lambda: None, lambda: bool(drive_answers))
    owner.publish([5, 6], [key(1), key(2)])
    leases = [reader.lease([key(number)]) for number in (1, 2)]
    read = Read(reader, [2])
    mixed = reader.source.start_copy([(leases[0], reader.targets(3))], [(read, [0], reader.targets(0))])
    later = reader.source.start_copy([(leases[1], reader.targets(6))])
    while gpu.step():
        if not any(ops and ops[0].is_ready() for stream, ops in gpu.streams.items() if stream != HOST + 1):
            break
    reader.source.poll()
    assert later.has_ended and not mixed.has_ended
    assert ids(owner.frame_table.retire(frames(5, 6))) == [5, 6], "nobody reads them any more"
    drive_answers.append(True)
    gpu.run()
    assert mixed.has_ended and mixed.finish()
    assert [reader.get(0, extent) for extent in range(EXTENTS)] == [stored(2, extent) for extent in range(EXTENTS)]
    assert reader.get(3, 0) == owner.content(5, 0)
