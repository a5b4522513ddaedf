# SPDX-License-Identifier: Apache-2.0
"""The linker over pools on a GPU, with the fake driver: SGLang's calls, in the order in which SGLang makes them."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin import test_linker as rig
from test.sglang_plugin.test_device_access import FORWARD, SCHEDULE, Device, Kernel, Rank
from test.unit.directory.rig import keys
from test.unit.transport.fake_gpu import FakeGpu

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin import device_access
from banyan.sglang_plugin.device_allocator import DeviceAllocator
from banyan.sglang_plugin.device_pool import DeviceMHAPool
from banyan.sglang_plugin.linker import BanyanLinker

PAGE, TOKENS, LAYERS = rig.PAGE, rig.TOKENS, rig.LAYERS


class GpuRank:
    def __init__(self, monkeypatch, gpu, roster, rank):
        rig.be_rank(monkeypatch, rank)
        self.gpu, self.driver = gpu, Device(gpu)
        self.pool = DeviceMHAPool(**rig.POOL)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape))
            self.driver.adopt(buffer)
        Rank.building = self
        monkeypatch.setattr(device_access, "CudaDriver", lambda: self.driver)
        self.events = [SimpleNamespace(cuda_event=self.driver.create_event()) for _ in range(2)]
        self.pages = DeviceAllocator(
            size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = SimpleNamespace(token_to_kv_pool_allocator=self.pages, page_size=PAGE, attn_tp_cache_group=None)
        monkeypatch.setattr(BanyanLinker, "record_offload_ready", lambda _linker: self.record_ready())
        forward = SimpleNamespace(cuda_stream=FORWARD)
        self.linker = BanyanLinker(
            rig.SERVER, params, components={ComponentType.FULL}, extra_config={}, forward_stream=forward
        )

    def record_ready(self):
        for event, stream in zip(self.events, (SCHEDULE, FORWARD), strict=True):
            self.driver.record_event(event.cuda_event, stream)
        return self.events

    def adopt_lists(self):
        """Page numbers lie in torch's memory, and the fake checks every address."""
        access = self.linker._access
        lists = [sent.frames for sent in access._published._sent] + self.pages._lane.tags()
        lists += [frames for source in access._sources for batch in source._under_way for _, frames in batch.loads]
        for tensor in lists:
            self.driver.adopt(tensor)


def let_the_device_run(ranks):
    for rank in ranks:
        rank.adopt_lists()
    ranks[0].gpu.run()


@pytest.fixture
def ranks(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(rig.module.seams, "verify", lambda process: None)
    monkeypatch.setattr(rig.module.report, "start", lambda *args, **kwargs: None)
    monkeypatch.setattr(rig.module.runtime, "config", lambda: Config(min_fetch_tokens=PAGE))
    roster = _native.Roster.create(4)
    monkeypatch.setattr(rig.module.runtime, "bookkeeping", lambda args: {"roster": roster.path, "server": "s"})
    monkeypatch.setattr(device_access, "KvTrans", Kernel)
    monkeypatch.setattr(device_access, "current_stream", lambda: SCHEDULE)
    monkeypatch.setattr(device_access.torch.cuda, "synchronize", gpu.run)
    return [GpuRank(monkeypatch, gpu, roster, rank) for rank in (0, 1)]


def test_prefix_when_offloaded_and_loaded_then_equal_and_the_scheduler_only_enqueued(ranks):
    owner, reader = ranks
    names, slots = keys(1, 2), owner.pages.alloc(2 * PAGE)
    assert owner.linker.offload(rig.transfer(names, slots))
    assert owner.linker.num_completed_offloads() == 0
    let_the_device_run(ranks)
    assert owner.linker.num_completed_offloads() == 1 and owner.linker.pop_completed_offload()
    assert reader.linker.lookup("r", rig.transfer(names, None)) == [2]
    targets = reader.pages.alloc(2 * PAGE)
    assert reader.linker.load("r", rig.transfer(names, targets))
    index = reader.linker.start_layer_wise_loading()
    reader.linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        reader.linker.layer_done_counter.wait_until(layer)
    assert reader.linker.finish_layer_wise_loading(index)
    assert not torch.equal(rig.page(reader.pool, targets), rig.page(owner.pool, slots)), "nothing has run yet"
    let_the_device_run(ranks)
    assert torch.equal(rig.page(reader.pool, targets), rig.page(owner.pool, slots))


def test_page_when_freed_while_a_peer_copies_it_then_it_comes_back_after_the_copy(ranks):
    owner, reader = ranks
    slots = owner.pages.alloc(PAGE)
    owner.linker.offload(rig.transfer(keys(1), slots))
    let_the_device_run(ranks)
    owner.linker.num_completed_offloads()
    assert reader.linker.lookup("r", rig.transfer(keys(1), None)) == [1]
    assert reader.linker.load("r", rig.transfer(keys(1), reader.pages.alloc(PAGE)))
    index = reader.linker.start_layer_wise_loading()
    owner.pages.free(slots)
    assert owner.pages.available_size() == TOKENS
    assert reader.linker.finish_layer_wise_loading(index)
    let_the_device_run(ranks)
    owner.linker.num_completed_offloads()
    assert len(owner.pages.free_pages) == TOKENS // PAGE - 1, "the reader has not settled"
    reader.linker.num_completed_offloads()
    owner.linker.num_completed_offloads()
    assert len(owner.pages.free_pages) == TOKENS // PAGE
