# SPDX-License-Identifier: Apache-2.0
"""Two ranks of a GPU server over the fake driver: announced, published when complete, fetched, backed up, left."""

import copy
import ctypes
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.unified_cache import unified_cache_linker
from test.unit.cache_rig import make_cache, request
from test.unit.directory.rig import NAMESPACE, ids, keys
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu, FakeKernel

from banyan import _native
from banyan.arena.backup import Backup
from banyan.arena.residency import Residency
from banyan.config import Config
from banyan.layout import BlockGeometry, Layout, MemberSlots, PageLayout
from banyan.layout.page import Part
from banyan.sglang_plugin.pools import device_access as module
from banyan.sglang_plugin.pools import device_start, rank_device
from banyan.sglang_plugin.pools.device_access import DeviceAccess
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.device_pool import DeviceDSAPool, DeviceMHAPool, DeviceMLAPool, describe_buffers
from banyan.sglang_plugin.pools.rank_device import RankDevice
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.sglang_plugin.runtime import Refused
from banyan.telemetry import Counters
from banyan.transport.capability import Route
from banyan.transport.cuda_ipc import gpu_io, host_pieces
from banyan.transport.cuda_ipc.copy_stream import BACKUP_PROGRAMS
from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.probe import SHARED_BYTES, pattern

PAGE, TOKENS, LAYERS = 4, 32, 3
COMMON = {"size": TOKENS, "page_size": PAGE, "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
MHA = {**COMMON, "head_num": 2, "head_dim": 8, "enable_alt_stream": False, "dtype": torch.bfloat16}
MLA = {**COMMON, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "dtype": torch.bfloat16}
SCHEDULE, FORWARD = 1, 2
FORWARD_STREAM = SimpleNamespace(cuda_stream=FORWARD)
TWO_RANKS = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=1)


class Device(FakeDriver):
    """The fake, with what a rank asks at its start; torch's memory counts as the device's."""

    num_streams = 10
    exportable = True
    torchs_stream = SCHEDULE

    def __init__(self, gpu):
        super().__init__(gpu)
        self.grids = []
        """Of each copy: its stream and how many programs it has."""

    def threads_per_sm(self, device):
        return 2048

    def create_stream(self):
        Device.num_streams += 1
        return Device.num_streams

    def create_partition_streams(self, num_sms, num_streams):
        raise DriverError("cuGreenCtxCreate", "CUDA_ERROR_NOT_SUPPORTED")

    def current_device(self):
        return 0

    devices_seen = 1
    apart = ()
    """Devices that this one cannot read."""

    def num_devices(self):
        return self.devices_seen

    def can_access(self, device, other):
        return device == other or (self.devices_seen > 1 and other not in self.apart)

    uuid = bytes(16)

    def device_uuid(self, device):
        return self.uuid

    def is_exportable(self, address):
        return self.exportable

    def adopt(self, tensor):
        self.gpu.memory[tensor.untyped_storage().data_ptr()] = bytearray(tensor.untyped_storage().nbytes())


class Kernel(FakeKernel):
    num_programs = None

    def __init__(self, *, table, page_bytes, chunks, shape, num_programs, on_stream):
        super().__init__(Rank.building.driver, SimpleNamespace(address=table, num_extents=len(page_bytes)), page_bytes)

    def warm_up(self, stream):
        self.driver._called("warm_up", stream)

    def programs_per_sm(self, sm_threads):
        return sm_threads // 512

    def on_grid(self, num_programs):
        other = copy.copy(self)
        other.num_programs = num_programs
        return other

    def enqueue(self, *, stream, **rest):
        self.driver.grids.append((stream, self.num_programs))
        super().enqueue(stream=stream, **rest)


class Rank:
    building = None

    def __init__(
        self,
        gpu,
        rank_table,
        slot,
        monkeypatch,
        *,
        pool=None,
        arena=None,
        exportable=True,
        uuid=bytes(16),
        gives_handles=True,
        layout=TWO_RANKS,
        forward_stream=FORWARD_STREAM,
    ):
        Rank.building = self
        self.driver = Device(gpu)
        self.driver.exportable = exportable
        self.driver.uuid = uuid
        if not gives_handles:
            self.driver.refuse["export_handle"] = 0
        self.pool = pool or DeviceMHAPool(**MHA)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
            self.driver.adopt(buffer)
        monkeypatch.setattr(device_start, "CudaDriver", lambda: self.driver)
        self.ready = [SimpleNamespace(cuda_event=self.driver.create_event()) for _ in range(2)]
        config = Config(copy_layers_per_launch=2, host_gb=0.0 if arena is None else None)
        self.device = RankDevice(config, [self.pool])
        self.member_slots = MemberSlots(layout, slot, 0)
        self.access = DeviceAccess(
            device=self.device,
            pool=self.pool,
            page_tokens=PAGE,
            rank_table=rank_table,
            member_slots=self.member_slots,
            config=config,
            num_slots=2 * layout.dp,
            forward_stream=forward_stream,
            record_ready=self.record_ready,
            arena=arena,
            has_arena=arena is not None,
            reserve=Reserve(0),
            devices=range(layout.dp),
        )
        self.rank_table, self.arena = rank_table, arena
        self.frame_table, self.source = self.access.join(NAMESPACE)
        self.cache = make_cache(
            self.frame_table,
            self.source,
            slot=slot,
            slots=[*self.member_slots.peers, *self.member_slots.arenas],
            layout=layout,
        )
        self.access.attach(lambda frames, names, window: self.cache.publish(frames, names))
        self.pages = DeviceAllocator(
            size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False
        )
        self.access.guard(self.pages, self.cache)
        self.gpu = gpu

    def record_ready(self):
        for event, stream in zip(self.ready, (SCHEDULE, FORWARD), strict=True):
            self.driver.record_event(event.cuda_event, stream)
        return self.ready

    def meet_peers(self):
        """Open who is there, whatever it takes."""
        for _ in range(3):
            self.access.poll()
            self.gpu.opener.run()
            self.access.poll()
            self.gpu.run()
        self.access.poll()

    def slots(self, *pages):
        return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])

    def offload(self, pages, names):
        slots = self.slots(*pages)
        assert self.access.offload(slots, names)
        for frames in numbers_under_way(self.device):
            self.driver.adopt(frames)

    def page(self, page):
        rows = slice(page * PAGE, (page + 1) * PAGE)
        return torch.stack([buffer[rows] for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)])


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(module, "KvTrans", Kernel)
    monkeypatch.setattr(module, "current_stream", lambda: SCHEDULE)
    gpu = FakeGpu()
    be_opened_by(monkeypatch, gpu.opener)
    be_waited_for(monkeypatch, gpu)
    return gpu


def numbers_under_way(device):
    """Tensors whose numbers are on their way to the host."""
    return [sent.frames for sent in device.offloads._lane._sent]


def be_waited_for(monkeypatch, gpu):
    """While somebody waits for the device it runs."""
    monkeypatch.setattr(module.torch.cuda, "synchronize", gpu.run)
    waits = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: gpu.run())
    monkeypatch.setattr(gpu_io, "time", waits)


def be_recorded(monkeypatch, gpu, current_stream):
    """Events that SGLang makes and records, wherever it does."""
    driver = FakeDriver(gpu)

    class Event:
        def __init__(self):
            self.cuda_event = driver.create_event()

        def record(self, stream=None):
            driver.record_event(self.cuda_event, current_stream() if stream is None else stream.cuda_stream)

    monkeypatch.setattr(unified_cache_linker, "device_module", SimpleNamespace(Event=Event))


def be_opened_by(monkeypatch, opener):
    """Peers are opened by this thread, and looked for at every poll."""
    monkeypatch.setattr(rank_device, "one_thread", lambda name: opener)
    monkeypatch.setattr(module, "PRESENCE_PERIOD_S", 0.0)


@pytest.fixture
def ranks(gpu, monkeypatch):
    rank_table = _native.RankTable.create(4)
    made = [Rank(gpu, rank_table, slot, monkeypatch) for slot in range(2)]
    made[1].meet_peers()
    return made


def fetch(rank, names, *pages):
    assert rank.cache.prepare(request("r"), names).num_pages == len(names)
    frames = rank.access.frames(rank.slots(*pages))
    rank.driver.adopt(frames)
    assert rank.cache.admit("r", names, frames)
    return rank.cache.start()


def test_offload_when_the_forward_has_not_ended_then_published_only_afterwards(gpu, ranks):
    owner, reader = ranks
    gpu.enqueue(FORWARD, lambda: None, lambda: False)
    owner.offload([3, 5], keys(1, 2))
    while gpu.step():
        pass
    owner.access.poll()
    assert reader.cache.prepare(request("r"), keys(1, 2)).num_pages == 0 and owner.access.num_completed == 0
    gpu.streams[FORWARD].popleft()
    gpu.run()
    owner.access.poll()
    assert reader.cache.prepare(request("r"), keys(1, 2)).num_pages == 2
    assert owner.access.num_completed == 1 and owner.access.pop_completed()


def test_fetch_when_started_then_the_peers_bytes_arrive_and_their_owner_gets_its_pages_back(gpu, ranks):
    owner, reader = ranks
    owner.offload([3, 5], keys(1, 2))
    gpu.run()
    owner.access.poll()
    index = fetch(reader, keys(1, 2), 7, 1)
    assert reader.cache.finish(index)
    owner.frame_table.retire(array("q", [3, 5]))
    assert owner.frame_table.num_quarantined == 2
    gpu.run()
    assert torch.equal(reader.page(7), owner.page(3)) and torch.equal(reader.page(1), owner.page(5))
    back, deadline_s = [], time.monotonic() + 5
    while len(back) < 2 and time.monotonic() < deadline_s:
        back += ids(owner.frame_table.drain())
    assert sorted(back) == [3, 5], "the reader does not poll"


def test_rank_when_sglang_names_no_stream_of_its_forwards_then_refused(gpu, monkeypatch, capsys):
    with pytest.raises((SystemExit, Refused)):
        Rank(gpu, _native.RankTable.create(4), 0, monkeypatch, forward_stream=None)
    assert "stream" in capsys.readouterr().err


def test_leave_when_pages_are_on_their_way_then_they_end_unpublished_and_all_is_closed(gpu, ranks):
    owner, reader = ranks
    owner.offload([3], keys(1))
    owner.access.leave()
    assert owner.access.num_completed == 1 and not owner.access.pop_completed()
    gpu.run()
    owner.access._readers.clear()
    owner.device.order.take()
    assert reader.cache.prepare(request("r"), keys(1)).num_pages == 0


def test_rank_when_it_has_left_and_could_not_join_again_then_its_steps_go_on(gpu, ranks):
    owner, _ = ranks
    owner.access.leave()
    owner.access.poll()
    owner.access.leave()


def test_forget_when_pages_are_on_their_way_then_they_are_neither_published_nor_counted(gpu, ranks):
    owner, reader = ranks
    owner.offload([3], keys(1))
    owner.access.forget()
    gpu.run()
    owner.access.poll()
    assert owner.access.num_completed == 0 and reader.cache.prepare(request("r"), keys(1)).num_pages == 0


def test_backup_when_pages_go_down_and_come_up_again_then_their_bytes_are_equal(gpu, monkeypatch):
    rank_table = _native.RankTable.create(4)
    block = BlockGeometry.of_page(DeviceMHAPool(**MHA).banyan_geometry.page)
    arenas = [_native.SharedBytes.create(4 * block.frame_bytes, f"arena-{slot}") for slot in range(2)]
    owner, reader = (Rank(gpu, rank_table, slot, monkeypatch, arena=arenas[slot]) for slot in range(2))
    view = owner.access.arena_peers(NAMESPACE, block, arenas[0])
    frame_table = _native.FrameTable(
        rank_table, owner.member_slots.own_arena, NAMESPACE, arenas[0], 4, block.table(), block.frame_bytes
    )
    owner.offload([3, 5], keys(1, 2))
    gpu.run()
    owner.access.poll()
    found = view.lookup(keys(1, 2), [owner.member_slots.own])
    copy = view.start_copy([(view.lease(found, keys(1, 2)), array("q", [1, 2]))])
    assert not copy.has_ended
    gpu.run()
    assert copy.has_ended and copy.finish()
    owner.access.poll()
    frame_table.publish(array("q", [1, 2]), keys(1, 2))
    owner.frame_table.reset()
    reader.meet_peers()
    fetch(reader, keys(1, 2), 6, 2)
    gpu.run()
    assert torch.equal(reader.page(6), owner.page(3)) and torch.equal(reader.page(2), owner.page(5))


def test_backup_when_copies_have_a_partition_then_those_down_run_beside_it_on_a_small_grid(gpu, monkeypatch):
    """They run where compute runs: the partition's grid would take 64 processors for one link."""
    granting = lambda driver, num_sms, num_streams: ([driver.create_stream() for _ in range(num_streams)], 16)  # noqa: E731
    monkeypatch.setattr(Device, "create_partition_streams", granting)
    rank_table, arena = _native.RankTable.create(4), arena_of_four_pages()
    owner = Rank(gpu, rank_table, 0, monkeypatch, arena=arena)
    block = BlockGeometry.of_page(owner.pool.banyan_geometry.page)
    view = owner.access.arena_peers(NAMESPACE, block, arena)
    owner.offload([3], keys(1))
    gpu.run()
    owner.access.poll()
    owner.driver.grids.clear()
    view.start_copy([(view.lease(view.lookup(keys(1), [owner.member_slots.own]), keys(1)), array("q", [1]))])
    assert set(owner.driver.grids) == {(owner.device.backup_stream, BACKUP_PROGRAMS)}
    assert BACKUP_PROGRAMS <= 16 < owner.access._kernel.num_programs
    gpu.run()


def pinned_parts(rank):
    """What of its own part of the arena a rank has registered, by offset and size."""
    start = torch.frombuffer(rank.arena, dtype=torch.uint8).data_ptr()
    calls = [call[1:] for call in rank.driver.calls if call[0] == "register_host"]
    return [(at - start, num_bytes) for at, num_bytes in calls if 0 <= at - start < rank.arena.num_bytes]


def test_arena_when_the_rank_starts_then_one_piece_is_pinned_and_others_when_they_are_needed(gpu, monkeypatch):
    """Nothing larger than a piece goes to the driver in one call, and no start waits for more than one."""
    arena = arena_of_four_pages()
    piece = arena.num_bytes // 4 + 64
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", piece)
    rank = Rank(gpu, _native.RankTable.create(4), 0, monkeypatch, arena=arena)
    assert pinned_parts(rank) == [(0, piece)] and rank.access.pins.num_pinned_bytes == piece
    with ThreadPoolExecutor(1) as another:
        another.submit(rank.access.pins.pin_to, piece + 1).result()
    assert pinned_parts(rank)[1:] == [(piece, piece)]
    assert rank.access.state()["num_pinned_host_bytes"] == 2 * piece


def test_arena_when_a_later_piece_is_refused_then_the_server_is_not(gpu, monkeypatch):
    arena = arena_of_four_pages()
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", arena.num_bytes // 4)
    rank = Rank(gpu, _native.RankTable.create(4), 0, monkeypatch, arena=arena)
    rank.driver.refuse["register_host"] = 0
    with pytest.raises(DriverError):
        rank.access.pins.pin_to(arena.num_bytes)
    assert rank.access.pins.num_pinned_bytes == arena.num_bytes // 4


@pytest.mark.parametrize("can_register", [True, False])
def test_backup_when_another_part_holds_the_page_then_passed_over_only_where_this_rank_can_read_it(
    gpu, monkeypatch, can_register
):
    rank_table = _native.RankTable.create(4)
    block = BlockGeometry.of_page(DeviceMHAPool(**MHA).banyan_geometry.page)
    arenas = [_native.SharedBytes.create(4 * block.frame_bytes, f"arena-{slot}") for slot in range(2)]
    ranks = [Rank(gpu, rank_table, slot, monkeypatch, arena=arenas[slot]) for slot in range(2)]
    views = [rank.access.arena_peers(NAMESPACE, block, rank.arena) for rank in ranks]
    frame_tables = [
        _native.FrameTable(
            rank_table, rank.member_slots.own_arena, NAMESPACE, rank.arena, 4, block.table(), block.frame_bytes
        )
        for rank in ranks
    ]
    frame_tables[1].publish(array("q", [0]), keys(1))
    if not can_register:
        ranks[0].driver.refuse["register_host"] = 0
    ranks[0].meet_peers()
    backup = Backup(
        residency=Residency(frame_tables[0], 4),
        peers=views[0],
        pool_slot=ranks[0].member_slots.own,
        pool_slots=ranks[0].member_slots.with_peers,
        arena_slots=ranks[0].member_slots.arenas,
        max_pages=4,
        counters=Counters(),
    )
    ranks[0].offload([3], keys(1))
    gpu.run()
    ranks[0].access.poll()
    backup.offer(keys(1))
    assert not backup.poll()
    gpu.run()
    assert len(backup.poll()) == (0 if can_register else 1)


def arena_of_four_pages():
    block = BlockGeometry.of_page(DeviceMHAPool(**MHA).banyan_geometry.page)
    return _native.SharedBytes.create(4 * block.frame_bytes, "arena")


def test_rank_when_its_pool_has_no_handles_then_refused_or_staged_through_the_arena(gpu, monkeypatch, capsys):
    rank_table = _native.RankTable.create(4)
    with pytest.raises((SystemExit, Refused)):
        Rank(gpu, rank_table, 0, monkeypatch, exportable=False)
    assert "no CUDA IPC handle" in capsys.readouterr().err
    staged = Rank(gpu, rank_table, 1, monkeypatch, exportable=False, arena=arena_of_four_pages())
    assert not staged.access.shares_pool and "export_handle" not in staged.driver.names()


@pytest.mark.parametrize(("granted", "num_programs"), [(None, 16), (24, 4 * 24)])
def test_copies_when_the_driver_grants_a_partition_then_their_grid_fills_it(gpu, monkeypatch, granted, num_programs):
    if granted is not None:
        granting = lambda driver, num_sms, num_streams: ([driver.create_stream() for _ in range(num_streams)], granted)  # noqa: E731
        monkeypatch.setattr(Device, "create_partition_streams", granting)
    rank = Rank(gpu, _native.RankTable.create(4), 0, monkeypatch)
    assert rank.access._kernel.num_programs == num_programs


def test_copies_when_the_user_says_how_many_processors_they_may_take_then_so_many(gpu, monkeypatch):
    monkeypatch.setattr(device_start, "CudaDriver", lambda: Device(gpu))
    device = RankDevice(Config(copy_sms=7), [DeviceMHAPool(**MHA)])
    assert device.take_copy_streams(lambda stream: None).num_sms == 7


def test_peer_when_its_gpu_alone_cannot_be_read_then_the_others_are_read_directly(gpu, monkeypatch, caplog):
    """Two halves of a machine, each behind a switch of its own: the near ranks share as if there were no other half."""
    monkeypatch.setattr(Device, "devices_seen", 3)
    monkeypatch.setattr(Device, "apart", (2,))
    layout = Layout(dp=3, attn_dp=1, attn_cp=1, attn_tp=1)
    rank_table = _native.RankTable.create(6)
    near, far, reader = (
        Rank(gpu, rank_table, slot, monkeypatch, arena=arena_of_four_pages(), layout=layout) for slot in (1, 2, 0)
    )
    near.offload([3], keys(1))
    far.offload([3], keys(2))
    gpu.run()
    near.access.poll()
    far.access.poll()
    reader.meet_peers()
    assert reader.access.shares_pool and "memory of device 2" in caplog.text
    assert reader.source.lookup(keys(1), [1, 2]).num_pages == 1
    assert reader.source.lookup(keys(2), [1, 2]).num_pages == 0, "by the arena"


def test_link_when_there_is_an_arena_then_it_is_measured_at_the_start(gpu, monkeypatch):
    rank_table = _native.RankTable.create(4)
    assert Rank(gpu, rank_table, 0, monkeypatch, arena=arena_of_four_pages()).access.link_bytes_per_s > 0
    assert Rank(gpu, rank_table, 1, monkeypatch).access.link_bytes_per_s == 0


def test_link_when_the_device_is_full_then_it_is_not_measured_and_the_start_goes_on(gpu, caplog):
    driver = FakeDriver(gpu)
    driver.refuse["allocate"] = 0
    assert device_start.measure_link(driver, 1, 0, 1 << 20) == 0.0 and "was not measured" in caplog.text


@pytest.mark.parametrize("sees_words", [True, False])
def test_ring_when_a_stream_does_not_see_a_word_then_there_is_none_and_the_word_stays(
    gpu, monkeypatch, caplog, sees_words
):
    monkeypatch.setattr(gpu_io, "WORD_PATIENCE_S", 0.01)
    driver = FakeDriver(gpu)
    if not sees_words:
        monkeypatch.setattr(gpu_io, "time", time)
    assert (device_start.open_ring(driver, stream=FORWARD, frame_bytes=4096) is not None) is sees_words
    assert ("did not see a word" in caplog.text) is not sees_words and "unregister_host" not in driver.names()


def test_rank_when_the_driver_gives_no_handle_then_refused_or_staged_through_the_arena(gpu, monkeypatch, capsys):
    rank_table = _native.RankTable.create(4)
    with pytest.raises((SystemExit, Refused)):
        Rank(gpu, rank_table, 0, monkeypatch, gives_handles=False)
    said = capsys.readouterr().err
    assert "export_handle" in said and "--banyan-host-gb" in said
    staged = Rank(gpu, rank_table, 1, monkeypatch, gives_handles=False, arena=arena_of_four_pages())
    assert not staged.access.shares_pool


@pytest.mark.parametrize("kind", [DeviceMHAPool, DeviceMLAPool])
def test_pool_when_described_then_pages_lie_where_it_says(kind):
    pool = kind(**(MHA if kind is DeviceMHAPool else MLA))
    assert pool.banyan_geometry.num_pages == TOKENS // PAGE + 1
    buffers = (
        [*zip(pool.k_buffer, pool.v_buffer, strict=True)]
        if kind is DeviceMHAPool
        else [(buffer,) for buffer in pool.kv_buffer]
    )
    placed = iter(pool.banyan_extents)
    for layer, extents in zip(buffers, pool.banyan_geometry.layers, strict=True):
        for buffer, extent in zip(layer, extents, strict=True):
            address, num_bytes = next(placed)
            assert buffer[2 * PAGE].data_ptr() == address + 2 * extent.page_bytes
            assert num_bytes == extent.num_bytes <= buffer.nbytes


def test_pool_when_it_has_index_keys_then_a_page_of_them_lies_beside_the_latents():
    pool = DeviceDSAPool(
        **{**MLA, "size": 128, "page_size": 64},
        kv_cache_dim=MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"],
        index_head_dim=128,
        index_buf_size=128,
    )
    page = pool.banyan_geometry.page
    assert [part.name for part in page.layers[0]] == ["latents", "index keys"] and pool.banyan_geometry.num_pages == 3
    placed = iter(pool.banyan_extents)
    for latents, keys_of_pages in zip(pool.kv_buffer, pool.index_key_cache.buffer, strict=True):
        assert next(placed) == (latents.data_ptr(), latents.nbytes)
        assert next(placed) == (keys_of_pages.data_ptr(), keys_of_pages.nbytes)


def test_describe_when_the_last_page_is_short_then_it_is_none():
    page = PageLayout.of_layers(1, Part("keys", PAGE * 8))
    geometry, _ = describe_buffers(page, [((torch.zeros(4 * PAGE + 1, 2), PAGE),)])
    assert geometry.num_pages == 4
    with pytest.raises(ValueError, match="no array of pages"):
        describe_buffers(page, [((torch.zeros(8, 4)[:, ::2], PAGE),)])


def test_peer_when_its_memory_reads_as_other_bytes_then_its_pages_are_computed_and_it_is_said(gpu, monkeypatch, caplog):
    rank_table = _native.RankTable.create(4)
    owner, reader = (Rank(gpu, rank_table, slot, monkeypatch) for slot in range(2))
    probe = owner.access._probe
    ctypes.memset(probe.address + probe.num_bytes - 1, 0x55 ^ pattern(probe.nonce, probe.num_bytes)[-1], 1)
    owner.offload([3], keys(1))
    gpu.run()
    owner.access.poll()
    reader.meet_peers()
    reader.meet_peers()
    assert reader.source.lookup(keys(1)).num_pages == 0 and not reader.driver.mapped
    assert caplog.text.count("reads as other bytes than it holds") == 1


@pytest.mark.parametrize(("refused", "after", "stays_open"), [("record_event", 0, True), ("create_event", 0, False)])
def test_peer_when_a_call_is_refused_once_its_probe_is_being_read_then_it_stays_open_and_is_not_looked_for(
    gpu, monkeypatch, caplog, refused, after, stays_open
):
    rank_table = _native.RankTable.create(4)
    owner, reader = (Rank(gpu, rank_table, slot, monkeypatch) for slot in range(2))
    owner.offload([3], keys(1))
    gpu.run()
    owner.access.poll()
    reader.access.poll()
    gpu.opener.run()
    reader.driver.refuse[refused] = after
    reader.access.poll()
    reader.driver.refuse.clear()
    gpu.run()
    reader.meet_peers()
    assert "no place for the pool of slot 0" in caplog.text and reader.source.lookup(keys(1)).num_pages == 0
    assert bool(reader.driver.mapped) is stays_open


@pytest.mark.parametrize("opens", [True, False])
def test_peer_when_it_lies_on_a_gpu_that_is_hidden_here_then_the_driver_decides_and_a_refusal_names_it(
    gpu, monkeypatch, caplog, opens
):
    rank_table = _native.RankTable.create(4)
    owner = Rank(gpu, rank_table, 0, monkeypatch, uuid=b"another GPU's id")
    reader = Rank(gpu, rank_table, 1, monkeypatch)
    if not opens:
        reader.driver.refuse["open_handle"] = 0
    owner.offload([3], keys(1))
    gpu.run()
    owner.access.poll()
    reader.meet_peers()
    assert reader.source.lookup(keys(1)).num_pages == opens
    assert ("CUDA_VISIBLE_DEVICES hides" in caplog.text) is not opens


def test_probe_when_peers_open_it_then_no_other_allocation_lies_in_the_block_that_they_map(ranks):
    gpu, probe = ranks[0].gpu, ranks[0].access._probe
    assert probe.address in gpu.exported.values()
    assert len(gpu.memory[probe.address]) % SHARED_BYTES == 0


class TwoPairs(Device):
    """Four GPUs; 0 and 1 reach each other, 2 and 3 do."""

    def num_devices(self):
        return 4

    def can_access(self, device, other):
        return device // 2 == other // 2


def test_route_when_the_pool_has_no_handles_then_staged_or_refused_by_the_reason(gpu, capsys):
    hidden, mute, extent = Device(gpu), Device(gpu), (gpu.allocate(64), 64)
    hidden.is_exportable = lambda address: False
    mute.refuse["export_handle"] = 0
    for driver, reason in ((hidden, "1 buffers of the KV pool"), (mute, "no handle of the KV pool")):
        found = device_start.find_route(driver, [extent], [], has_arena=True)
        assert found.route is Route.STAGED and reason in found.line
        with pytest.raises((SystemExit, Refused)):
            device_start.find_route(driver, [extent], [], has_arena=False)
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("devices", "is_direct"), [([0, 1], True), ([0, 1, 2, 3], False), ([0, 9], True)])
def test_route_when_gpus_cannot_read_each_other_then_only_those_of_the_member_slots_matter(
    gpu, devices, is_direct, capsys
):
    driver = TwoPairs(gpu)
    if is_direct:
        assert device_start.find_route(driver, [], devices, has_arena=False).route is Route.DIRECT
    else:
        assert device_start.find_route(driver, [], devices, has_arena=True).apart == (2, 3)
        assert device_start.find_route(driver, [], [0, 2], has_arena=True).route is Route.STAGED
        with pytest.raises((SystemExit, Refused)):
            device_start.find_route(driver, [], devices, has_arena=False)
        assert "device 2, 3" in capsys.readouterr().err
