# SPDX-License-Identifier: Apache-2.0
"""Ranks of a GPU server whose model has sliding windows, over the fake device: two pools, two allocators, streams of
their own for each rank."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.allocator import swa
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin.pools.test_device_access import (
    Device,
    Kernel,
    Rank,
    be_opened_by,
    be_recorded,
    be_waited_for,
)
from test.sglang_plugin.rank import test_linker as rig
from test.unit.transport.fake_gpu import FakeGpu

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin.pools import device_access, device_start
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool
from banyan.sglang_plugin.rank.linker import BanyanLinker

PAGE, TOKENS, WINDOW_TOKENS, WINDOW_PAGES = rig.PAGE, 64, 6, 2
NUM_SLOTS = 8
WINDOWED, FULL = [0, 2, 3], [1, 4]
NUM_LAYERS = len(WINDOWED) + len(FULL)
POISON = 77.0
PLAIN = Config(min_fetch_tokens=PAGE, host_gb=0.0, copy_layers_per_launch=1)


class Stretch:
    """An allocation with so many bytes."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def __len__(self):
        return self.num_bytes


class WindowDevice(Device):
    """Page numbers lie in torch's memory: whatever is copied from there is the device's."""

    torchs_stream = property(lambda device: GpuWindowRank.current)

    def copy_async(self, target, source, num_bytes, stream):
        if isinstance(self.gpu.memory.setdefault(source, Stretch(0)), Stretch):
            self.gpu.memory[source] = Stretch(max(num_bytes, len(self.gpu.memory[source])))
        super().copy_async(target, source, num_bytes, stream)


def make_pool(**sizes):
    kwargs = {name: value for name, value in rig.POOL.items() if name not in ("size", "layer_num")}
    return SWAKVPool(
        size=TOKENS,
        size_swa=TOKENS // 2,
        swa_attention_layer_ids=WINDOWED,
        full_attention_layer_ids=FULL,
        token_to_kv_pool_class=DeviceMHAPool,
        **kwargs,
        **sizes,
    )


def parts_of(pool):
    """SGLang's pools behind one in front, or the one pool."""
    return (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,)


def heads_of(part):
    return (*part.k_buffer, *part.v_buffer)


def transfer(names, slots):
    return SimpleNamespace(keys=names, device_indices=slots)


class GpuWindowRank:
    """``full`` and ``window`` are its allocators: a subclass has pages of another kind beside the full ones."""

    current = 0
    """The stream of the calling thread, of whichever rank it is."""
    components = frozenset({ComponentType.FULL, ComponentType.SWA})
    num_layers, num_needed, page_tokens, slots_a_page = NUM_LAYERS, WINDOW_PAGES, PAGE, PAGE
    """Of what is beside: pages that a prefix needs before its end, and slots of one."""

    def __init__(self, monkeypatch, gpu, rank_table, number, config, adopt, make_drafts, sizes):
        rig.be_started(monkeypatch, rank_table, number, config)
        Rank.building = self
        self.gpu, self.driver = gpu, WindowDevice(gpu)
        self.schedule, self.forward = 100 * number + 1, 100 * number + 2
        monkeypatch.setattr(device_start, "CudaDriver", lambda: self.driver)
        more = self.build_pools(monkeypatch, **sizes)
        self.drafts = make_drafts()
        buffers = [*self.tensors(), *self.draft_tensors()]
        for buffer in buffers:
            self.fill(buffer)
        adopt(self.driver, buffers)
        params = rig.parameters_of(self.allocator, self.page_tokens, drafts=self.drafts, **more)
        be_recorded(monkeypatch, gpu, lambda: GpuWindowRank.current)
        with self.on(self.schedule):
            self.linker = BanyanLinker(
                rig.SERVER,
                params,
                components=set(self.components),
                extra_config={},
                forward_stream=SimpleNamespace(cuda_stream=self.forward),
            )

    def build_pools(self, monkeypatch, **sizes):
        """``pool``, ``allocator``, ``full`` and ``window``; what SGLang tells a linker of them."""
        monkeypatch.setattr(swa, "current_platform", SimpleNamespace(get_paged_allocator_cls=lambda: DeviceAllocator))
        self.pool = make_pool(**sizes)
        self.allocator = swa.SWATokenToKVPoolAllocator(
            TOKENS, TOKENS // 2, PAGE, torch.bfloat16, "cpu", kvcache=self.pool, need_sort=False
        )
        self.full, self.window = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        return {"swa_retain_window": WINDOW_TOKENS}

    def tensors(self):
        """All that the model keeps."""
        return [buffer for part in self.parts for buffer in heads_of(part)]

    def draft_tensors(self):
        drafts = [part for draft in self.drafts for part in parts_of(draft)]
        return [buffer for part in drafts for buffer in heads_of(part)]

    def fill(self, buffer):
        buffer.copy_(torch.randn(buffer.shape))

    @property
    def parts(self):
        return parts_of(self.pool)

    @contextmanager
    def on(self, stream):
        """The calling thread is this rank's, and enqueues on ``stream``."""
        before, GpuWindowRank.current = GpuWindowRank.current, stream
        try:
            yield
        finally:
            GpuWindowRank.current = before

    # ---- what SGLang calls

    def poll(self):
        with self.on(self.schedule):
            return self.linker.num_completed_offloads()

    def poll_copies(self):
        """What a rank that waits for pages goes on with."""
        with self.on(self.schedule):
            self.linker.kinds.full.access._rank_device.settle()

    def meet_peers(self):
        """Open who is there, whatever it takes."""
        for _ in range(3):
            self.poll()
            self.gpu.opener.run()
            self.poll()
            self.gpu.run()
        self.poll()

    def alloc(self, num_pages, num_beside):
        """Slots in both pools, of the last pages in the windows'."""
        with self.on(self.schedule):
            return self.full.alloc(num_pages * self.page_tokens), self.window.alloc(num_beside * self.slots_a_page)

    def free(self, full, window):
        with self.on(self.schedule):
            self.full.free(full)
            self.window.free(window)

    def offload(self, names, full, window=None):
        """A node of SGLang's tree; without ``window`` it is a tombstone."""
        transfers = [transfer(names, full)]
        if window is not None:
            transfers.append(self.at_end(names, window))
        with self.on(self.schedule):
            assert self.linker.offload(transfers)

    def offer_again(self, names, full, window):
        with self.on(self.schedule):
            self.linker.offer_again(names, full, (names[-len(window) // PAGE :], window))

    def lookup(self, names, rid="r"):
        with self.on(self.schedule):
            return self.linker.lookup(rid, [transfer(names, None), transfer(names[-self.num_needed :], None)])

    def load(self, names, rid="r"):
        """Where the pages go, or None."""
        full, window = self.alloc(len(names), min(self.num_needed, len(names)))
        return (full, window) if self.load_into(names, full, window, rid) else None

    def load_into(self, names, full, window, rid="r"):
        with self.on(self.schedule):
            return self.linker.load(rid, [transfer(names, full), self.at_end(names, window)])

    def at_end(self, names, window):
        """The last of these pages, beside."""
        return transfer(names[-len(window) // self.slots_a_page :], window)

    def start(self):
        with self.on(self.schedule):
            index = self.linker.start_layer_wise_loading()
        with self.on(self.forward):
            self.linker.layer_done_counter.set_consumer(index)
        return index

    def wait_until(self, layer):
        with self.on(self.forward):
            self.linker.layer_done_counter.wait_until(layer)

    def finish(self, index):
        with self.on(self.schedule):
            return self.linker.finish_layer_wise_loading(index)

    def enqueue_forward(self):
        """One that reads nothing: each layer waits. Its batch."""
        index = self.start()
        for layer in range(self.num_layers):
            self.wait_until(layer)
        return index

    def land(self):
        """Such a forward, and its end on the scheduler's side."""
        return self.finish(self.enqueue_forward())

    # ---- what lies in the pools

    def layer(self, layer, full, window):
        """Keys and values that the layer sees: of the full pages, or of the window's."""
        number, is_windowed = self.pool.layers_mapping[layer]
        part, slots = (self.parts[1], window) if is_windowed else (self.parts[0], full)
        return torch.stack([part.k_buffer[number][slots], part.v_buffer[number][slots]])

    def content(self, full, window):
        return [self.layer(layer, full, window) for layer in range(self.num_layers)]

    def buffers(self, part):
        """Of one pool: what is indexed by its slots."""
        return heads_of(self.parts[part])

    def enqueue_write(self, stream, part, slots, value=POISON):
        """A forward that writes pages of one pool, one buffer after the other. ``value`` None: noise."""
        for buffer in self.buffers(part):

            def write(buffer=buffer):
                buffer[slots] = torch.randn(buffer[slots].shape).to(buffer.dtype) if value is None else value

            self.gpu.enqueue(stream, write)


def in_allocations(driver, buffers):
    for buffer in buffers:
        driver.adopt(buffer)


def in_one_allocation(driver, buffers):
    """As torch may lay them: it cuts what it has got from the driver into pieces."""
    base = min(buffer.data_ptr() for buffer in buffers)
    driver.gpu.memory[base] = Stretch(max(buffer.data_ptr() + buffer.nbytes for buffer in buffers) - base)


def make_node(
    monkeypatch,
    config,
    *,
    seed=0,
    num_ranks=2,
    adopt=in_allocations,
    make_drafts=lambda: (),
    kind=GpuWindowRank,
    **sizes,
):
    """The ranks of a server that has just started."""
    gpu = FakeGpu(seed)
    rank_table = _native.RankTable.create(NUM_SLOTS)
    monkeypatch.setattr(device_access, "KvTrans", Kernel)
    monkeypatch.setattr(device_access, "current_stream", lambda: GpuWindowRank.current)
    monkeypatch.setattr(device_access, "markable_stream", lambda: None)
    be_waited_for(monkeypatch, gpu)
    be_opened_by(monkeypatch, gpu.opener)
    ranks = [
        kind(monkeypatch, gpu, rank_table, number, config, adopt, make_drafts, sizes) for number in range(num_ranks)
    ]
    for rank in ranks:
        rank.meet_peers()
    return ranks


def let_the_device_run(ranks):
    ranks[0].gpu.run()
    for rank in ranks:
        rank.poll()


def publish(rank, names, num_windowed=None):
    """A node whose pages are complete, and where they lie."""
    full, window = rank.alloc(len(names), len(names) if num_windowed is None else num_windowed)
    rank.offload(names, full, window if len(window) else None)
    let_the_device_run([rank])
    assert rank.linker.pop_completed_offload()
    return full, window


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def accesses(rank):
    return rank.linker.kinds.full.access, rank.linker.kinds.beside[0].access
