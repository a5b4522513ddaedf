# SPDX-License-Identifier: Apache-2.0
"""Two ranks that step together over the fake device: one is short by exactly the page that the other reads.

The reader's scheduler stands at the barrier until the owner comes: it polls nothing meanwhile.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from test.unit.cache_rig import make_cache
from test.unit.directory.rig import keys
from test.unit.transport.fake_gpu import torchs_uploads
from test.unit.transport.gpu_node import NUM_PAGES, make_node

from banyan.sglang_plugin.pools import allocator, device_allocator, quarantine
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.sglang_plugin.rank import prefill, times
from banyan.transport.cuda_ipc.readback import ReadbackLane

PAGE_TOKENS = 4
USABLE = NUM_PAGES - 1
LANE = 99
PATIENCE_S = 2.0
TWO = [object()] * 2
"""Requests that each begin a page with their next token."""


class Ranks:
    """An owner whose pool is full and a reader that is fetching the owner's page. Both on one device."""

    def __init__(self, monkeypatch):
        self.gpu, self.owner, self.reader = make_node()
        cache = make_cache(self.owner.frame_table, self.owner.source)
        self.pages = DeviceAllocator(
            size=USABLE * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=None,
            need_sort=False,
        )
        order = ReadbackOrder()
        lane = ReadbackLane(self.owner.driver, stream=LANE, num_pages=NUM_PAGES)
        uploads = torchs_uploads(self.gpu, NUM_PAGES)
        self.pages.attach_lane(cache, lane, uploads, lambda: [], Reserve(0), order, order.take)
        self.slots = self.pages.alloc(USABLE * PAGE_TOKENS)
        self.tree = SimpleNamespace(supports_prefix_sharing=lambda: False)
        self.owner.publish([3], keys(1))
        self.barrier = threading.Barrier(2, timeout=5 * PATIENCE_S)
        for module in (quarantine, device_allocator):
            monkeypatch.setattr(module, "READER_PATIENCE_S", PATIENCE_S)

    def lease(self):
        """The reader's step: it fetches the page and goes to the barrier, where it waits for the owner."""
        lease = self.reader.lease(keys(1))
        self.reader.source.start_copy([(lease, self.reader.targets(5))])

    def evict(self):
        """The owner's step: SGLang frees the page, and the device brings its number."""
        page = self.slots[2 * PAGE_TOKENS : 3 * PAGE_TOKENS]
        assert (page // PAGE_TOKENS == 3).all()
        self.pages.free(page)
        self.bring_numbers()
        self.pages.poll()

    def bring_numbers(self):
        """Of freed pages. The fake checks every address, and these lie in torch's memory."""
        for tensor in self.pages._lane.tags():
            self.gpu.memory[tensor.data_ptr()] = bytearray(tensor.nbytes)
        self.gpu.run_stream(LANE)

    def has_capacity(self, requests):
        return self.pages.check_decode_capacity(
            num_tokens=PAGE_TOKENS * len(requests), tree_cache=self.tree, requests=requests
        )

    def decode(self):
        """One request begins a page."""
        lengths = torch.tensor([PAGE_TOKENS + 1])
        return self.pages.alloc_decode(lengths, lengths, torch.tensor([2 * PAGE_TOKENS - 1]))

    def draft(self):
        """One request begins a page with its next token and its drafts, for which SGLang has an extension."""
        before, num_drafts = torch.tensor([PAGE_TOKENS]), PAGE_TOKENS - 1
        after = before + num_drafts
        return self.pages.alloc_extend(before, before, after, after, torch.tensor([2 * PAGE_TOKENS - 1]), num_drafts)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


@pytest.fixture
def lockstep(ranks, monkeypatch):
    monkeypatch.setattr(prefill, "step_together", lambda most_moved: None)
    planner = SimpleNamespace(decode_us=lambda: None, token_us=lambda: None)
    times.step_together([ranks.pages], planner, token_bytes=1, is_whole_rank=True)
    return ranks


@pytest.mark.parametrize("step", [Ranks.decode, Ranks.draft], ids=["a token", "a token and drafts"])
def test_decode_when_the_reader_waits_for_the_owner_then_its_copy_lets_the_page_go(ranks, monkeypatch, step):
    """Nothing of the reader runs but the device: each waits for the other, and the owner gets its page."""
    came = []

    def reader_steps():
        ranks.barrier.wait()
        came.append("reader")

    ranks.lease()
    ranks.evict()
    assert ranks.pages._num_held == 1
    stands = threading.Thread(target=reader_steps)
    stands.start()
    let_go_later(ranks, monkeypatch)
    assert step(ranks) is not None, "the owner has waited for the reader's scheduler, which waits for it"
    ranks.barrier.wait()
    stands.join(PATIENCE_S)
    assert came == ["reader"]


def test_capacity_when_ranks_step_together_and_a_peer_reads_the_last_page_then_a_request_is_retracted(lockstep):
    lockstep.lease()
    lockstep.evict()
    lockstep.pages.free(lockstep.slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    lockstep.bring_numbers()
    assert lockstep.pages.available_size() == 2 * PAGE_TOKENS
    assert not lockstep.has_capacity(TWO), "one of the two pages is a peer's to let go"


def test_capacity_when_a_page_was_freed_and_its_number_comes_then_it_counts_if_nobody_reads_it(lockstep, monkeypatch):
    lockstep.pages.free(lockstep.slots[4 * PAGE_TOKENS : 6 * PAGE_TOKENS])
    monkeypatch.setattr(device_allocator.time, "sleep", lambda seconds: lockstep.bring_numbers())
    assert lockstep.has_capacity(TWO)
    assert lockstep.pages.num_uncounted_tokens == 0


def test_capacity_when_others_can_be_evicted_instead_of_what_is_read_then_nobody_is_retracted(lockstep, monkeypatch):
    kept = list(lockstep.slots[4 * PAGE_TOKENS :].split(PAGE_TOKENS))

    def evict(params):
        for _ in range(-(-params.num_tokens // PAGE_TOKENS)):
            lockstep.pages.free(kept.pop())

    lockstep.tree = SimpleNamespace(supports_prefix_sharing=lambda: True, evict_for_alloc=evict)
    monkeypatch.setattr(device_allocator.time, "sleep", lambda seconds: lockstep.bring_numbers())
    lockstep.lease()
    lockstep.evict()
    assert lockstep.has_capacity(TWO)


def let_go_later(ranks, monkeypatch):
    """The device goes on while the owner waits."""
    sleep = quarantine.time.sleep

    def go_on(seconds):
        ranks.gpu.run()
        sleep(seconds)

    monkeypatch.setattr(quarantine.time, "sleep", go_on)


def test_capacity_when_the_last_request_needs_what_a_peer_reads_then_it_waits_instead_of_being_aborted(
    lockstep, monkeypatch
):
    lockstep.lease()
    lockstep.evict()
    let_go_later(lockstep, monkeypatch)
    assert lockstep.has_capacity(TWO[:1])


@pytest.mark.parametrize("requests", [TWO, TWO[:1]], ids=["two", "the last"])
def test_capacity_when_a_replicas_reader_lets_go_in_time_then_what_it_read_counts(ranks, monkeypatch, requests):
    ranks.lease()
    ranks.evict()
    if len(requests) > 1:
        ranks.pages.free(ranks.slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
        ranks.bring_numbers()
    let_go_later(ranks, monkeypatch)
    assert ranks.has_capacity(requests)
    assert ranks.pages._num_held == 0, "nothing is left for the allocation to wait for"


@pytest.mark.parametrize("requests", [TWO, TWO[:1]], ids=["two", "the last"])
def test_capacity_when_a_replicas_reader_stands_still_then_sglang_takes_a_request_back(
    ranks, monkeypatch, caplog, requests
):
    """A decode that gets no page ends the server."""
    monkeypatch.setattr(allocator, "CIRCLE_S", 0.02)
    monkeypatch.setattr(allocator, "READER_PATIENCE_S", 0.05)
    ranks.lease()
    ranks.evict()
    if len(requests) > 1:
        ranks.pages.free(ranks.slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
        ranks.bring_numbers()
    assert not ranks.has_capacity(requests)
    assert "peers have held 1 page(s)" in caplog.text
    monkeypatch.setattr(quarantine.time, "sleep", None)
    assert not ranks.has_capacity(requests), "and without a wait for every request that is taken back"
    assert caplog.text.count("peers have held") == 1, "nor a line for each"


def test_capacity_when_a_rank_has_several_shards_then_none_answers_otherwise_than_the_others(ranks):
    ranks.pages.is_whole_rank = False
    ranks.lease()
    ranks.evict()
    assert ranks.has_capacity(TWO[:1])
