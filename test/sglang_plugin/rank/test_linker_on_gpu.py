# SPDX-License-Identifier: Apache-2.0
"""The linker over pools on a GPU, with the fake driver: SGLang's calls, in the order in which SGLang makes them."""

import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin.pools.test_device_access import (
    FORWARD,
    FORWARD_STREAM,
    SCHEDULE,
    Device,
    Kernel,
    Rank,
    be_opened_by,
    be_recorded,
    be_waited_for,
    numbers_under_way,
)
from test.sglang_plugin.rank import test_linker as rig
from test.unit.directory.rig import keys
from test.unit.transport.fake_gpu import FakeGpu

from banyan import _native
from banyan.cache import NOTHING_QUEUED
from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools import device_access, device_start, kind_pools
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.device_pool import DeviceMHAPool
from banyan.sglang_plugin.rank import arena_memory, arena_part, planning
from banyan.sglang_plugin.rank.linker import BanyanLinker
from banyan.sglang_plugin.runtime import Refused
from banyan.transport.cuda_ipc.driver import DriverError

PAGE, TOKENS, LAYERS = rig.PAGE, rig.TOKENS, rig.LAYERS


class GpuRank:
    def __init__(self, monkeypatch, gpu, rank_table, rank, draft_sizes=()):
        rig.be_rank(monkeypatch, rank)
        self.gpu, self.driver = gpu, Device(gpu)
        self.pool, *self.drafts = (DeviceMHAPool(**{**rig.POOL, **sizes}) for sizes in ({}, *draft_sizes))
        for pool in (self.pool, *self.drafts):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.copy_(torch.randn(buffer.shape))
                self.driver.adopt(buffer)
        Rank.building = self
        monkeypatch.setattr(device_start, "CudaDriver", lambda: self.driver)
        self.pages = DeviceAllocator(
            size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = rig.parameters_of(self.pages, PAGE, drafts=tuple(self.drafts))
        monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "null")
        be_recorded(monkeypatch, gpu, lambda: SCHEDULE)
        self.linker = BanyanLinker(
            rig.SERVER, params, components={ComponentType.FULL}, extra_config={}, forward_stream=FORWARD_STREAM
        )

    def meet_peers(self):
        """Open who is there, whatever it takes."""
        for _ in range(3):
            self.linker.num_completed_offloads()
            self.gpu.opener.run()
            self.linker.num_completed_offloads()
            self.gpu.run()
        self.linker.num_completed_offloads()

    def adopt_lists(self):
        """Page numbers lie in torch's memory, and the fake checks every address."""
        access = self.linker.kinds.full.access
        lists = numbers_under_way(access._rank_device) + self.pages._lane.tags()
        batches = [batch for reader in access._readers for batch in reader._under_way]
        lists += [part.targets for batch in batches for part in batch.leased + batch.arriving]
        for tensor in lists:
            if isinstance(tensor, torch.Tensor):
                self.driver.adopt(tensor)


def let_the_device_run(ranks):
    for rank in ranks:
        rank.adopt_lists()
    ranks[0].gpu.run()


def step_all(ranks):
    """The device does what it can; some stream may wait."""
    for rank in ranks:
        rank.adopt_lists()
    while ranks[0].gpu.step():
        pass


def make_node(monkeypatch, config, num_ranks=2, draft_sizes=()):
    """The ranks of a server that has just started."""
    gpu, verified = FakeGpu(), []
    monkeypatch.setattr(rig.module.seams, "verify", verified.append)
    monkeypatch.setattr(rig.module.report, "start", lambda *args, **kwargs: None)
    monkeypatch.setattr(runtime, "config", lambda: config)
    rank_table = _native.RankTable.create(4)
    monkeypatch.setattr(runtime, "bookkeeping", lambda args: rig.carried(rank_table))
    monkeypatch.setattr(device_access, "KvTrans", Kernel)
    monkeypatch.setattr(device_access, "current_stream", lambda: SCHEDULE)
    monkeypatch.setattr(device_access, "markable_stream", lambda: SCHEDULE)
    be_waited_for(monkeypatch, gpu)
    be_opened_by(monkeypatch, gpu.opener)
    ranks = [GpuRank(monkeypatch, gpu, rank_table, rank, draft_sizes) for rank in range(num_ranks)]
    assert verified == ["scheduler"] * num_ranks
    for rank in ranks:
        rank.meet_peers()
    return ranks


@pytest.fixture
def ranks(monkeypatch):
    return make_node(monkeypatch, Config(min_fetch_tokens=PAGE))


def test_reserve_when_the_user_said_nothing_then_it_is_for_what_sglang_resolved(ranks):
    assert ranks[0].pages._reserve.chunk_tokens == min(rig.SCHEDULE.chunked_prefill_size, TOKENS // 16)


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


@pytest.mark.parametrize("busy", [SCHEDULE, FORWARD])
def test_pages_when_one_of_sglangs_streams_has_not_ended_then_they_are_neither_published_nor_written(ranks, busy):
    """Only SGLang's linker knows which streams these are: it records the events."""
    owner, reader = ranks
    gpu, names = owner.gpu, keys(1, 2)
    slots = owner.pages.alloc(2 * PAGE)
    gpu.enqueue(busy, lambda: None, lambda: False)
    owner.linker.offload(rig.transfer(names, slots))
    step_all(ranks)
    assert owner.linker.num_completed_offloads() == 0
    gpu.streams[busy].popleft()
    step_all(ranks)
    assert owner.linker.num_completed_offloads() == 1
    assert reader.linker.lookup("r", rig.transfer(names, None)) == [2]
    targets = reader.pages.alloc(2 * PAGE)
    before = rig.page(reader.pool, targets)
    assert reader.linker.load("r", rig.transfer(names, targets))
    gpu.enqueue(busy, lambda: None, lambda: False)
    index = reader.linker.start_layer_wise_loading()
    step_all(ranks)
    assert torch.equal(rig.page(reader.pool, targets), before)
    gpu.streams[busy].popleft()
    step_all(ranks)
    assert reader.linker.finish_layer_wise_loading(index)
    assert torch.equal(rig.page(reader.pool, targets), rig.page(owner.pool, slots))


def test_pages_when_a_flush_is_put_off_while_their_numbers_are_on_their_way_then_nobody_finds_them_behind_it(ranks):
    owner, reader = ranks
    names, slots = keys(1, 2), owner.pages.alloc(2 * PAGE)
    assert owner.linker.offload(rig.transfer(names, slots))
    owner.linker.withdraw()
    let_the_device_run(ranks)
    assert owner.linker.num_completed_offloads() == 1 and not owner.linker.pop_completed_offload()
    assert reader.linker.lookup("r", rig.transfer(names, None)) == []


def test_prefix_when_a_draft_lies_on_the_device_too_then_its_rows_come_behind_the_models(monkeypatch):
    sizes = ({"layer_num": 1, "head_num": 1, "head_dim": 4}, {"layer_num": 2, "head_num": 1})
    ranks = owner, reader = make_node(monkeypatch, Config(min_fetch_tokens=PAGE), draft_sizes=sizes)
    names, slots = keys(1, 2), owner.pages.alloc(2 * PAGE)
    owner.linker.offload(rig.transfer(names, slots))
    let_the_device_run(ranks)
    owner.linker.num_completed_offloads()
    targets = reader.pages.alloc(2 * PAGE)
    assert reader.linker.lookup("r", rig.transfer(names, None)) == [2]
    assert reader.linker.load("r", rig.transfer(names, targets))
    index = reader.linker.start_layer_wise_loading()
    reader.linker.layer_done_counter.set_consumer(index)
    reader.linker.layer_done_counter.wait_until(LAYERS - 1)
    assert reader.linker.finish_layer_wise_loading(index)
    let_the_device_run(ranks)
    for ours, theirs in zip((reader.pool, *reader.drafts), (owner.pool, *owner.drafts), strict=True):
        assert torch.equal(rig.page(ours, targets), rig.page(theirs, slots))


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
    owner.linker.num_completed_offloads()
    assert len(owner.pages.free_pages) == TOKENS // PAGE - 1, "the copy has not run"
    let_the_device_run(ranks)
    deadline_s = time.monotonic() + 5
    while owner.pages._num_held and time.monotonic() < deadline_s:
        owner.linker.num_completed_offloads()
    assert len(owner.pages.free_pages) == TOKENS // PAGE


def test_rank_when_it_has_started_then_the_dispatcher_knows_its_pages_and_what_its_allocations_waited(ranks):
    assert ranks[0].linker.kinds.full.rank_table.page_tokens == PAGE
    ranks[0].pages.wait_us = 7
    assert ranks[0].linker.counters_now().alloc_wait_us == 7


@pytest.mark.parametrize(("has_handles", "free_bytes"), [(False, 0), (False, 1 << 36), (True, 0)])
def test_rank_when_its_pool_has_no_handles_then_it_needs_an_arena_that_there_is(
    monkeypatch, capsys, has_handles, free_bytes
):
    """An arena that was to be had and found no memory takes no pages."""
    monkeypatch.setattr(Device, "exportable", has_handles)
    monkeypatch.setattr(arena_memory, "LEAST_FRAMES", 1)
    monkeypatch.setattr(arena_part._native, "available_bytes", lambda: free_bytes)
    if has_handles or free_bytes:
        (rank,) = make_node(monkeypatch, Config(min_fetch_tokens=PAGE), num_ranks=1)
        assert rank.linker.kinds.full.access.shares_pool is has_handles
        return
    with pytest.raises((SystemExit, Refused)):
        make_node(monkeypatch, Config(min_fetch_tokens=PAGE), num_ranks=1)
    assert "--banyan-host-gb" in capsys.readouterr().err


def test_pool_when_sglang_has_made_its_buffers_another_way_then_refused(ranks, monkeypatch, capsys):
    rank = ranks[0]
    del rank.pool.banyan_geometry
    params = SimpleNamespace(
        token_to_kv_pool_allocator=rank.pages,
        mtp_draft_device_pools=(),
        mtp_draft_mamba_pools=(),
        sidecar_draft_device_pools=(),
    )
    with pytest.raises((SystemExit, runtime.Refused)):
        kind_pools.whole_pool({ComponentType.FULL}, params)
    assert "--banyan-share off" in capsys.readouterr().err


def run_prefill(rank, index):
    """A forward that computes on the scheduler's stream; SGLang's calls around it."""
    rank.linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        rank.linker.layer_done_counter.wait_until(layer)
        for _ in range(10):
            rank.gpu.enqueue(SCHEDULE, lambda: None)


def test_planner_when_the_device_has_passed_a_prefill_or_a_copy_then_it_learns_how_long_that_took(ranks, monkeypatch):
    owner, reader = ranks
    monkeypatch.setattr(planning.prefill, "pieces_of_this_pass", lambda: ((100, 0),))
    assert reader.linker.start_layer_wise_loading() == NOTHING_QUEUED
    run_prefill(reader, NOTHING_QUEUED)
    owner.linker.offload(rig.transfer(keys(1, 2), owner.pages.alloc(2 * PAGE)))
    let_the_device_run(ranks)
    for rank in ranks:
        rank.linker.num_completed_offloads()
    (forward,) = reader.linker.state()["forwards"]
    assert forward["forward_us"] == pytest.approx(10 * LAYERS, abs=LAYERS)
    assert reader.linker.lookup("r", rig.transfer(keys(1, 2), None)) == [2]
    assert reader.linker.load("r", rig.transfer(keys(1, 2), reader.pages.alloc(2 * PAGE)))
    index = reader.linker.start_layer_wise_loading()
    run_prefill(reader, index)
    assert reader.linker.finish_layer_wise_loading(index)
    assert reader.linker.state()["move_us_per_token"] == {}
    let_the_device_run(ranks)
    reader.linker.num_completed_offloads()
    state = reader.linker.state()
    assert state["move_us_per_token"]["peer"] and state["copy_us"] > 0
    assert len(state["forwards"]) == 1, "a forward that waits for a copy is no lesson"


def go_on_until(rank, condition):
    """Device, store and scheduler go on, each at its own pace."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        rank.adopt_lists()
        while rank.gpu.step():
            pass
        rank.linker.num_completed_offloads()
        time.sleep(0.001)


def store_pages(monkeypatch, config, names):
    """A server writes pages to its store, and stops; their bytes."""
    monkeypatch.setattr(rig.identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(rig.module.requests, "inserted_chain", lambda page_tokens: names)
    (rank,) = make_node(monkeypatch, config, num_ranks=1)
    slots = rank.pages.alloc(len(names) * PAGE)
    rank.linker.offload(rig.transfer(names, slots))
    go_on_until(rank, lambda: rank.linker.counters.archived_pages == len(names))
    content = rig.page(rank.pool, slots)
    rank.linker.close()
    return content


def load(rank, names):
    """SGLang admits a request and launches its forward; the slots and the number of its batch."""
    assert rank.linker.lookup("r", rig.transfer(names, None)) == [len(names)]
    slots = rank.pages.alloc(len(names) * PAGE)
    assert rank.linker.load("r", rig.transfer(names, slots))
    index = rank.linker.start_layer_wise_loading()
    rank.linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        rank.linker.layer_done_counter.wait_until(layer)
    return slots, index


@pytest.fixture
def stored(tmp_path):
    return Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(str(tmp_path),), store_gb=1.0, store_admit="first")


def test_prefix_when_only_the_store_has_it_then_the_forward_is_enqueued_before_it_has_been_read(monkeypatch, stored):
    names = keys(1, 2, 3)
    content = store_pages(monkeypatch, stored, names)
    (rank,) = make_node(monkeypatch, stored, num_ranks=1)
    slots, index = load(rank, names)
    waits = [call for call in rank.driver.calls if call[0] == "wait_flag"]
    assert len(waits) >= 1, "the copies wait for words, not the scheduler for reads"
    assert not torch.equal(rig.page(rank.pool, slots), content)
    assert rank.linker.finish_layer_wise_loading(index)
    for _ in range(3):
        rank.linker.num_completed_offloads()
    assert rank.linker.counters.read_pages == 0, "frames that the device has yet to read are not handed out"
    go_on_until(rank, lambda: rank.linker.counters.read_pages == len(names))
    assert torch.equal(rig.page(rank.pool, slots), content)
    rank.linker.close()


def test_prefix_when_a_stored_page_is_damaged_then_the_batch_fails(monkeypatch, stored, tmp_path):
    names = keys(1, 2)
    store_pages(monkeypatch, stored, names)
    damage(tmp_path)
    (rank,) = make_node(monkeypatch, stored, num_ranks=1)
    _, index = load(rank, names)
    assert not rank.linker.finish_layer_wise_loading(index)
    go_on_until(rank, lambda: not rank.linker.cache._ending)
    # The read ends by itself, maybe behind the batch.
    go_on_until(rank, lambda: rank.linker.counters.read_failed_pages > 0)
    rank.linker.close()


def damage(folder):
    """Change a byte in the middle of every stretch of data that the segments hold."""
    for path in folder.rglob("*"):
        if path.is_file() and "segment" in path.name:
            content = bytearray(path.read_bytes())
            for at in range(4096 + 17, len(content), 512):
                content[at] ^= 0xFF
            path.write_bytes(content)


def test_reset_when_the_device_still_reads_what_came_from_the_store_then_it_is_waited_for(monkeypatch, stored):
    names = keys(1, 2)
    store_pages(monkeypatch, stored, names)
    (rank,) = make_node(monkeypatch, stored, num_ranks=1)
    _, index = load(rank, names)
    assert rank.linker.finish_layer_wise_loading(index)
    rank.adopt_lists()
    monkeypatch.setattr(device_access.time, "sleep", lambda seconds: rank.gpu.step())
    rank.linker.reset()
    assert not rank.linker.cache._ending and rank.linker.lookup("s", rig.transfer(names, None)) == []
    rank.linker.close()


def test_rank_when_streams_cannot_wait_for_words_then_pages_are_leased_once_they_have_landed(
    monkeypatch, stored, caplog
):
    names = keys(1, 2)
    content = store_pages(monkeypatch, stored, names)
    monkeypatch.setattr(Device, "wait_flag", lambda *args: (_ for _ in ()).throw(DriverError("wait_flag", "NO")))
    (rank,) = make_node(monkeypatch, stored, num_ranks=1)
    assert "leased when all their layers have landed" in caplog.text
    monkeypatch.setattr(rig.module.requests, "prompt_keys", lambda request, page_tokens: names)
    rank.linker.arrive("r")
    go_on_until(rank, lambda: rank.linker.counters.read_pages == len(names))
    slots, index = load(rank, names)
    assert rank.linker.finish_layer_wise_loading(index)
    let_the_device_run([rank])
    assert torch.equal(rig.page(rank.pool, slots), content)
    rank.linker.close()
