# SPDX-License-Identifier: Apache-2.0
"""What shards of one size have stored is read by those of another, over the real native store; and every way in which
a part of a page may be missing ends as a miss, never as other bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test.unit.arena.test_backup import ARENAS
from test.unit.directory.rig import keys
from test.unit.layout.test_namespace import ONE

from banyan._native import FrameTable, Peers, RankTable, Read, SharedBytes, Store
from banyan.arena.page_source import Wanted, all_that_is_found
from banyan.arena.prefetch import Prefetch
from banyan.arena.residency import Residency
from banyan.features.resharding.heads import heads_of, pieces
from banyan.features.resharding.rank import stored_shards
from banyan.features.resharding.rank.stored_shards import Division, Shape, StoredShards
from banyan.layout import BlockGeometry
from banyan.telemetry import Counters

NUM_HEADS, NUM_LAYERS, NUM_TOKENS = 4, 3, 16
KEY_DIM, VALUE_DIM = 32, 16
WANTED = keys(1, 2, 3, 4)
AT_ONCE = 3


def content(key: str, head: int, layer: int, part: str, dim: int) -> np.ndarray:
    """Of all tokens of a page."""
    seed = hashlib.sha256(f"{key} {head} {layer} {part}".encode()).digest()[:8]
    rng = np.random.default_rng(int.from_bytes(seed, "little"))
    return rng.integers(0, 256, (NUM_TOKENS, 1, dim), dtype=np.uint8)


def page_bytes(key: str, heads: Sequence[int]) -> bytes:
    """The Full Block of a page with these heads."""
    return b"".join(
        np.concatenate([content(key, head, layer, part, dim) for head in heads], axis=1).tobytes()
        for layer in range(NUM_LAYERS)
        for part, dim in (("keys", KEY_DIM), ("values", VALUE_DIM))
    )


def namespace_of(size: int, shard: int, **other):
    num_own = len(heads_of(NUM_HEADS, size, shard))
    parts = tuple((name, NUM_TOKENS * num_own * dim) for name, dim in (("keys", KEY_DIM), ("values", VALUE_DIM)))
    return replace(ONE, page=(parts,) * NUM_LAYERS, attn_tp_size=size, attn_tp_rank=shard, **other)


def block_of(namespace) -> BlockGeometry:
    return BlockGeometry(tuple(tuple(num_bytes for _, num_bytes in parts) for parts in namespace.page))


def open_store(folder: Path, size: int, shard: int, **other) -> Store:
    namespace = namespace_of(size, shard, **other)
    layer_bytes = block_of(namespace).layer_bytes
    return Store.open([str(folder)], namespace.digest(), layer_bytes, quota_bytes=64 << 20, floor_bytes=0)


def store_pages(store: Store, size: int, shard: int, names: Sequence[str], behind: str | None = None) -> None:
    blocks = [page_bytes(name, heads_of(NUM_HEADS, size, shard)) for name in names]
    stride = -(-len(blocks[0]) // 4096) * 4096
    memory = SharedBytes.create(stride * len(names), "writer")
    for number, block in enumerate(blocks):
        memoryview(memory)[number * stride : number * stride + len(block)] = block
    offsets = array("q", range(0, stride * len(names), stride))
    assert store.put(list(names), behind, memory, offsets) == ["queued"] * len(names)
    assert store.sync() == 0


def write(folder: Path, size: int, names: Sequence[str] = WANTED) -> None:
    """Servers of this size have been here."""
    for shard in range(size):
        store = open_store(folder, size, shard)
        store_pages(store, size, shard, names)
        store.close()


class Shard:
    """One shard with its part of the arena, its own store, and what another size has stored in the same folder."""

    def __init__(self, folder: Path, size: int, shard: int, other: int, *, num_frames: int = 8) -> None:
        namespace, self.heads = namespace_of(size, shard), heads_of(NUM_HEADS, size, shard)
        self.store = open_store(folder, size, shard)
        self.block = block_of(namespace)
        self.memory = SharedBytes.create(num_frames * self.block.frame_bytes, "arena")
        table, digest, slot = RankTable.create(4), namespace.digest(), ARENAS[0]
        places = (self.memory, self.block.frame_bytes)
        self.frame_table = FrameTable(
            table, slot, digest, self.memory, num_frames, self.block.table(), self.block.frame_bytes
        )
        self.residency = Residency(self.frame_table, num_frames)
        self.counters = Counters()
        self.prefetch = Prefetch(
            store=self.store,
            residency=self.residency,
            peers=Peers(table, None, slot, digest, self.block.table(), *places),
            arena_slots=ARENAS,
            memory=self.memory,
            frame_bytes=self.block.frame_bytes,
            max_pages=1000,
            layers_per_read=1,
            counters=self.counters,
        )
        theirs = namespace_of(other, 0)
        needed = list(pieces(NUM_HEADS, self.heads, other))
        stores = [
            self.store.beside(namespace_of(other, piece.shard).digest(), block_of(theirs).layer_bytes, len(needed))
            for piece in needed
        ]
        self.num_records = [store.stats()["num_records"] for store in stores]
        self.other_bytes = len(needed) * block_of(theirs).block_bytes
        self.division = Division(
            other,
            list(zip(needed, stores, strict=True)),
            Shape(block_of(theirs), len(heads_of(NUM_HEADS, other, 0)), NUM_TOKENS),
            SharedBytes.create(AT_ONCE * len(needed) * block_of(theirs).frame_bytes, "reshard"),
        )
        self.source = self.source_of(self.division)

    def source_of(self, division: Division) -> StoredShards:
        own = Shape(self.block, len(self.heads), NUM_TOKENS)
        return StoredShards([division], shape=own, prefetch=self.prefetch, counters=self.counters)

    def ask(self, names: Sequence[str] = WANTED, num_held: int = 0) -> int:
        return self.source.ask(Wanted("r", names, num_held, all_that_is_found, num_held))

    def poll(self) -> None:
        self.source.poll()
        self.prefetch.poll()

    def until_landed(self) -> None:
        self.until(lambda: not self.prefetch._readings)

    def until(self, condition) -> None:
        deadline_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
            self.poll()

    def landed(self) -> dict[str, bytes]:
        """What lies in the arena."""
        found = {}
        for name in WANTED:
            frame = self.residency.frame(name)
            if frame is not None:
                start = frame * self.block.frame_bytes
                found[name] = bytes(memoryview(self.memory)[start : start + self.block.block_bytes])
        return found

    def right(self, *numbers: int) -> dict[str, bytes]:
        return {WANTED[number]: page_bytes(WANTED[number], self.heads) for number in numbers}

    def close(self) -> None:
        self.source.close()
        self.store.close()


@pytest.fixture
def opened(tmp_path) -> Iterator:
    made: list[Shard] = []

    def open_shard(size: int, shard: int, other: int, **more) -> Shard:
        made.append(Shard(tmp_path, size, shard, other, **more))
        return made[-1]

    yield open_shard
    for shard in made:
        shard.close()


def shelves(folder: Path) -> list[Path]:
    """Those with pages, by namespace of their only writer: in the order in which they were made."""
    return sorted(folder.glob("shelf-*"), key=lambda path: path.stat().st_ctime_ns)


@pytest.mark.parametrize(("own_size", "other"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4), (4, 8), (8, 4), (8, 16)])
def test_pages_when_another_size_has_stored_them_then_each_shard_finds_its_heads_of_them(
    opened, tmp_path, own_size, other
):
    write(tmp_path, other)
    for number in range(own_size):
        shard = opened(own_size, number, other)
        assert shard.ask() == len(WANTED)
        shard.until_landed()
        assert shard.landed() == shard.right(0, 1, 2, 3)
        counters = shard.counters
        assert (counters.read_pages, counters.read_failed_pages, counters.resharded_pages) == (4, 0, 4)
        assert counters.read_bytes == 4 * shard.block.block_bytes
        assert counters.resharded_bytes == 4 * shard.other_bytes


@pytest.mark.parametrize("num_rows", [NUM_TOKENS, 1], ids=["nhd", "hnd"])
def test_heads_when_they_lie_side_by_side_or_apart_then_those_of_each_token_are_put_together(num_rows):
    kv = np.arange(NUM_LAYERS * 2 * NUM_TOKENS * NUM_HEADS * 4).astype(np.uint8)
    kv = kv.reshape(NUM_LAYERS, 2, NUM_TOKENS, NUM_HEADS, 4)

    def shape_of(num_heads: int) -> Shape:
        return Shape(BlockGeometry(((NUM_TOKENS * num_heads * 4,) * 2,) * NUM_LAYERS), num_heads, num_rows)

    def page(heads: range) -> bytes:
        part = kv[:, :, :, heads.start : heads.stop]
        return (part if num_rows > 1 else part.swapaxes(2, 3)).tobytes()

    own, theirs = heads_of(NUM_HEADS, 1, 0), shape_of(2)
    needed = list(pieces(NUM_HEADS, own, 2))
    division = Division(2, [(piece, None) for piece in needed], theirs, SharedBytes.create(4 * 4096, "reshard"))
    for number, piece in enumerate(needed):
        place, block = division.offset(number, 1), page(heads_of(NUM_HEADS, 2, piece.shard))
        memoryview(division.memory)[place : place + len(block)] = block
    memory = SharedBytes.create(4096, "arena")
    division.put_together(1, shape_of(NUM_HEADS).parts(memory, 0))
    assert bytes(memoryview(memory)[: kv.size]) == page(own)


def test_folder_when_it_is_looked_at_and_read_then_nothing_is_made_in_it(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    before = sorted(tmp_path.rglob("*"))
    shard.ask()
    shard.until_landed()
    assert shard.landed() and sorted(tmp_path.rglob("*")) == before


def test_size_when_nobody_has_stored_anything_with_it_then_it_has_no_records(opened, tmp_path):
    write(tmp_path, 2)
    assert opened(4, 0, 1).num_records == [0]
    assert opened(1, 0, 2).num_records == [4, 4]


def test_page_when_one_shard_never_had_it_then_only_those_before_it_are_found(opened, tmp_path):
    for shard, names in ((0, WANTED), (1, WANTED[:2])):
        store = open_store(tmp_path, 2, shard)
        store_pages(store, 2, shard, names)
        store.close()
    shard = opened(1, 0, 2)
    assert shard.ask() == 2
    shard.until_landed()
    assert shard.landed() == shard.right(0, 1)


def test_pages_when_the_first_are_held_then_the_others_are_found_behind_them(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    assert shard.ask(num_held=3) == 4
    shard.until_landed()
    assert shard.landed() == shard.right(3)


@pytest.mark.parametrize(("num_read", "found"), [(1, (0,)), (2, (0, 1, 2, 3))])
def test_pages_when_the_own_store_reads_not_all_that_it_has_before_them_then_they_take_no_frames(
    opened, tmp_path, num_read, found
):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    store_pages(shard.store, 1, 0, WANTED[:2])
    shard.prefetch.start_reads(WANTED, lambda num_missing, run: num_read)
    shard.source.ask(Wanted("r", WANTED, 2, all_that_is_found))
    shard.until_landed()
    assert shard.landed() == shard.right(*found)


def test_page_when_a_part_of_it_is_damaged_then_a_miss_and_not_found_again(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    (segment,) = shelves(tmp_path)[1].glob("segment-*")
    block = page_bytes(WANTED[1], heads_of(NUM_HEADS, 2, 1))[:64]
    data = bytearray(segment.read_bytes())
    data[data.index(block) + 5] ^= 1
    segment.write_bytes(data)
    assert shard.ask() == 4
    shard.until_landed()
    assert shard.landed() == shard.right(0, 2, 3) and shard.counters.read_failed_pages == 1
    assert shard.ask() == 1


def test_page_when_the_bytes_of_another_lie_in_its_place_then_a_miss(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    (segment,) = shelves(tmp_path)[0].glob("segment-*")
    data = bytearray(segment.read_bytes())
    record_bytes = 4096 * (1 + NUM_LAYERS)
    data[4096 : 4096 + record_bytes] = data[4096 + record_bytes : 4096 + 2 * record_bytes]
    segment.write_bytes(data)
    shard.ask()
    shard.until_landed()
    assert shard.landed() == shard.right(1, 2, 3)


def test_page_when_one_shard_evicts_it_after_the_lookup_then_a_miss_or_its_own_bytes(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    owner = open_store(tmp_path, 2, 1)
    assert owner.evict(1) == 1
    owner.sync()
    shard.ask()
    shard.until_landed()
    assert shard.landed().items() <= shard.right(0, 1, 2, 3).items()
    shard.until(lambda: shard.ask() == 3)
    owner.close()


def test_pages_when_a_shelf_is_removed_under_a_reader_then_misses(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    shutil.rmtree(shelves(tmp_path)[1])
    # Whoever has looked since finds none of it; else its pages fail.
    num_found = shard.ask()
    shard.until_landed()
    assert shard.landed() == {} and shard.counters.read_failed_pages == num_found


def test_pages_when_another_server_clears_them_then_they_are_not_found_from_then_on(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    owner = open_store(tmp_path, 2, 1)
    assert owner.clear() == 4
    assert shard.ask() == 0, "before anybody has looked"
    store_pages(owner, 2, 1, WANTED[:2])
    shard.until(lambda: shard.ask() == 2)
    owner.close()


def test_pages_when_a_server_of_the_other_size_still_stores_then_found_at_the_next_look(opened, tmp_path):
    write(tmp_path, 2, WANTED[:1])
    shard = opened(1, 0, 2)
    assert shard.ask() == 1
    for number in range(2):
        store = open_store(tmp_path, 2, number)
        store_pages(store, 2, number, WANTED[1:], WANTED[0])
        store.close()
    shard.until(lambda: shard.ask() == 4)
    shard.until_landed()
    assert shard.landed() == shard.right(0, 1, 2, 3)


def test_weights_when_they_are_others_then_nothing_is_found(opened, tmp_path):
    for number in range(2):
        store = open_store(tmp_path, 2, number, weights_sha256="others")
        store_pages(store, 2, number, WANTED)
        store.close()
    assert opened(1, 0, 2).ask() == 0


class Late:
    """A read that the drive has not answered in time, and answers when it is told to."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.is_late, self.has_ended, self.bytes_read = True, False, 0

    def failed_pages(self) -> list[int]:
        return list(range(AT_ONCE))


class Hanging:
    """The store of a shard whose drive does not answer the next read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lookup, self.close = store.lookup, store.close
        self.late: list[Late] = []

    def read(self, *asked, **how) -> Read | Late:
        read = self._store.read(*asked, **how)
        if self.late:
            return read
        self.late.append(Late(read))
        return self.late[0]


def test_drive_when_it_does_not_answer_then_who_waits_is_let_go_and_its_memory_waits_for_the_answer(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    (first, store), second = shard.division.shards
    hanging = Hanging(store)
    shard.source = shard.source_of(replace(shard.division, shards=[(first, hanging), second]))
    for _ in range(2):
        assert shard.ask() == 4
        shard.until_landed()
        assert shard.landed() == {} and shard.residency.num_filling == 0
    assert shard.counters.read_failed_pages == 8 and stored_shards._late == hanging.late
    hanging.late[0].has_ended = True
    shard.ask()
    shard.until_landed()
    assert shard.landed() == shard.right(0, 1, 2, 3) and stored_shards._late == []


def test_page_when_it_goes_between_the_lookup_and_the_read_then_a_miss(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    found = shard.division.lookup(WANTED)
    owner = open_store(tmp_path, 2, 1)
    owner.clear()
    start = partial(shard.source._start, shard.division, WANTED)
    shard.prefetch.start_reads(WANTED, all_that_is_found, found, (), start)
    shard.until_landed()
    assert shard.landed() == {} and shard.counters.read_failed_pages == 4
    owner.close()


def test_weights_when_they_change_during_a_read_then_nothing_of_it_stays(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    shard.ask()
    # As HostTier leaves.
    shard.source.forget()
    shard.prefetch.quiesce()
    shard.source.close()
    assert shard.landed() == {} and shard.residency.num_filling == 0


class Held:
    """The store of a shard whose reads and end wait for ``go_on``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lookup, self.num_reads = store.lookup, 0
        self.go_on, self.closed = threading.Event(), threading.Event()

    def read(self, *asked, **how) -> Read:
        self.num_reads += 1
        assert self.go_on.wait(10)
        return self._store.read(*asked, **how)

    def close(self) -> None:
        assert self.go_on.wait(10)
        self.closed.set()


def held(shard: Shard) -> Held:
    """The first of the stores that it reads, from now on."""
    (first, store), *others = shard.division.shards
    one = Held(store)
    shard.source = shard.source_of(replace(shard.division, shards=[(first, one), *others]))
    return one


def test_prompts_when_one_is_read_already_then_others_are_queued_as_far_as_they_come_within_a_second(opened, tmp_path):
    others = keys(5, 6)
    write(tmp_path, 2)
    write(tmp_path, 2, others)
    shard = opened(1, 0, 2)
    store = held(shard)
    assert shard.ask() == len(WANTED)
    assert shard.ask(others) == 0, "nobody knows how fast pages come"
    shard.counters.resharded_pages, shard.counters.resharded_us = len(WANTED) - 1, 1_000_000
    assert shard.ask(others) == 0, "those of the first take longer"
    shard.counters.resharded_pages += 1
    assert shard.ask(others) == len(others)
    store.go_on.set()
    shard.until_landed()
    assert shard.landed() == shard.right(0, 1, 2, 3) and shard.counters.read_pages == len(WANTED) + len(others)


def test_read_when_nobody_wants_it_any_more_then_it_ends_with_what_is_under_way(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    store = held(shard)
    assert shard.ask() == len(WANTED) > AT_ONCE
    shard.until(lambda: store.num_reads == 1)
    shard.source.forget()
    store.go_on.set()
    shard.until_landed()
    assert store.num_reads == 1 and shard.landed() == {}
    shard.ask()
    shard.until_landed()
    assert shard.landed() == shard.right(0, 1, 2, 3)


def test_source_when_a_store_waits_for_its_drive_then_who_closes_it_does_not(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)
    store = held(shard)
    shard.source.close()
    assert not store.closed.is_set()
    store.go_on.set()
    assert store.closed.wait(10)


def test_pages_when_there_is_no_thread_for_them_then_misses(opened, tmp_path, monkeypatch):
    write(tmp_path, 2)
    shard = opened(1, 0, 2)

    def none(*work, **how):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(shard.source._workers, "submit", none)
    shard.ask()
    shard.until_landed()
    assert shard.landed() == {} and shard.counters.read_failed_pages == len(WANTED)
    monkeypatch.setattr(stored_shards, "start_thread", none)
    shard.source.close()
    with pytest.raises(ValueError, match="closed"):
        shard.division.shards[0][1].register(shard.memory)


def test_arena_when_it_has_too_few_frames_then_as_many_pages_as_fit(opened, tmp_path):
    write(tmp_path, 2)
    shard = opened(1, 0, 2, num_frames=2)
    shard.ask()
    shard.until_landed()
    assert shard.landed() == shard.right(0, 1) and shard.counters.reads_dropped_pages == 2


def test_source_when_it_is_closed_then_its_threads_end(opened, tmp_path):
    write(tmp_path, 2)
    before = len(os.listdir("/proc/self/task"))
    shard = opened(1, 0, 2)
    shard.ask()
    shard.until_landed()
    assert len(os.listdir("/proc/self/task")) > before
    shard.close()
    shard.until(lambda: len(os.listdir("/proc/self/task")) <= before)


def test_limit_of_reads_when_several_are_read_beside_a_store_then_they_share_it(tmp_path):
    places = ([str(tmp_path)], ONE.digest(), [4096])
    store = Store.open(*places, quota_bytes=64 << 20, floor_bytes=0, read_bytes_per_s=100_000_000)
    assert "at most 25 MB/s" in store.beside(ONE.digest(), [4096], 4).engine
    store.close()
