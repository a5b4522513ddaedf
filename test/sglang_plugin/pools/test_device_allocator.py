# SPDX-License-Identifier: Apache-2.0
"""Freed pages whose numbers only the device knows: counted, not handed out before they came, never lost."""

from types import SimpleNamespace

import pytest
import torch
from test.unit.cache_rig import make_cache
from test.unit.directory.rig import NUM_FRAMES, Rank, frames, keys
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu, torchs_uploads

from banyan import faults
from banyan._native import RankTable
from banyan.sglang_plugin.pools import allocator, quarantine
from banyan.sglang_plugin.pools.device_allocator import DeviceAllocator
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.transport.cuda_ipc.readback import ReadbackLane

PAGE_TOKENS = 4
ALL_SLOTS = (NUM_FRAMES - 1) * PAGE_TOKENS
LANE, FORWARD = 5, 6
NO_RESERVE = Reserve(0)


class Node:
    def __init__(self, reserve=NO_RESERVE):
        rank_table = RankTable.create(2)
        self.ranks = [Rank(rank_table, slot) for slot in range(2)]
        self.gpu = FakeGpu()
        driver = FakeDriver(self.gpu)
        self.cache = make_cache(self.ranks[0].frame_table, self.ranks[0].peers)
        self.pages = DeviceAllocator(
            size=ALL_SLOTS, page_size=PAGE_TOKENS, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False
        )
        lane = ReadbackLane(driver, stream=LANE, num_pages=NUM_FRAMES)
        self.events = []
        order = ReadbackOrder()
        uploads = torchs_uploads(self.gpu, NUM_FRAMES)
        self.pages.attach_lane(self.cache, lane, uploads, lambda: self.events, reserve, order, order.take)
        self.driver = driver

    def arrive(self):
        """Let the device bring the numbers. The fake checks every address, and these lie in torch's memory."""
        for tensor in self.pages._lane.tags():
            self.gpu.memory[tensor.data_ptr()] = bytearray(tensor.nbytes)
        self.gpu.run()

    def come(self):
        self.arrive()
        self.pages.poll()


@pytest.fixture
def node():
    return Node()


def page_ids(slots):
    return (slots[::PAGE_TOKENS] // PAGE_TOKENS).tolist()


def test_free_when_the_numbers_are_on_their_way_then_counted_and_not_handed_out(node):
    slots = node.pages.alloc(2 * PAGE_TOKENS)
    node.pages.free(slots)
    assert node.pages.available_size() == ALL_SLOTS
    assert sorted(node.pages.get_all_free_pages().tolist()) == list(range(1, NUM_FRAMES))
    assert not set(page_ids(slots)) & set(node.pages.free_pages.tolist())
    node.come()
    assert set(page_ids(slots)) < set(node.pages.free_pages.tolist())
    assert node.pages.available_size() == ALL_SLOTS


def test_free_when_a_peer_reads_one_then_the_others_are_free_and_it_follows(node):
    slots = node.pages.alloc(3 * PAGE_TOKENS)
    held = page_ids(slots)[1]
    node.cache.publish(frames(*page_ids(slots)), keys(1, 2, 3))
    peers = node.ranks[1].peers
    lease = peers.lease(peers.lookup(keys(2)), keys(2))
    node.pages.free(slots)
    node.come()
    assert held not in node.pages.free_pages.tolist()
    assert node.pages.available_size() == ALL_SLOTS
    lease.release()
    node.pages.poll()
    assert held in node.pages.free_pages.tolist()


def test_free_when_not_come_yet_then_peers_still_find_the_page(node):
    slots = node.pages.alloc(PAGE_TOKENS)
    node.cache.publish(frames(*page_ids(slots)), keys(1))
    node.pages.free_segment(slots, start_pos=0)
    assert node.ranks[1].peers.lookup(keys(1)).num_pages == 1
    node.come()
    assert node.ranks[1].peers.lookup(keys(1)).num_pages == 0


def test_free_when_the_driver_refuses_then_sglang_goes_on_and_the_pages_are_held_until_they_can_be_sent(
    node, monkeypatch
):
    stopped = []
    monkeypatch.setattr(faults, "_stop", lambda: stopped.append(True))
    slots = node.pages.alloc(3 * PAGE_TOKENS)
    node.cache.publish(frames(*page_ids(slots)), keys(1, 2, 3))
    node.driver.refuse["copy_async"] = 0
    node.pages.free(slots[: 2 * PAGE_TOKENS])
    node.pages.free(slots[2 * PAGE_TOKENS :])
    for _ in range(10 * NUM_FRAMES):
        node.pages.poll()
    assert stopped == [True] and node.pages.available_size() == ALL_SLOTS
    assert sorted(node.pages.get_all_free_pages().tolist()) == list(range(1, NUM_FRAMES))
    assert not set(page_ids(slots)) & set(node.pages.free_pages.tolist())
    node.driver.refuse.clear()
    node.pages.poll()
    node.come()
    assert set(page_ids(slots)) < set(node.pages.free_pages.tolist())
    assert node.ranks[1].peers.lookup(keys(1, 2, 3)).num_pages == 0 and node.pages.available_size() == ALL_SLOTS


@pytest.mark.parametrize("is_read", [False, True])
def test_free_when_there_is_no_memory_to_put_numbers_back_then_no_page_is_lost_and_each_list_has_had_its_turn(
    node, monkeypatch, is_read
):
    stopped = []
    monkeypatch.setattr(faults, "_stop", lambda: stopped.append(True))
    slots = node.pages.alloc(3 * PAGE_TOKENS)
    node.cache.publish(frames(*page_ids(slots)), keys(1, 2, 3))
    peers = node.ranks[1].peers
    lease = peers.lease(peers.lookup(keys(2)), keys(2))
    if not is_read:
        lease.release()
    node.pages.free(slots)
    with monkeypatch.context() as short:
        short.setattr(node.pages, "_put_back", raising(torch.OutOfMemoryError("of the device")))
        node.come()
        node.pages.poll()
    assert stopped and not node.pages._order._senders
    assert node.pages.available_size() == ALL_SLOTS
    assert sorted(node.pages.get_all_free_pages().tolist()) == list(range(1, NUM_FRAMES))
    lease.release()
    node.pages.poll()
    assert sorted(node.pages.free_pages.tolist()) == list(range(1, NUM_FRAMES))
    assert peers.lookup(keys(1, 2, 3)).num_pages == 0


def raising(error):
    def put_back(page_ids):
        raise error

    return put_back


def test_clear_when_pages_could_not_be_sent_then_every_page_is_free_once(node):
    node.driver.refuse["copy_async"] = 0
    node.pages.free(node.pages.alloc(5 * PAGE_TOKENS))
    node.cache.reset()
    node.pages.clear()
    assert sorted(node.pages.get_all_free_pages().tolist()) == list(range(1, NUM_FRAMES))


def test_alloc_when_the_pool_is_short_then_it_waits_for_the_numbers(node, monkeypatch):
    slots = node.pages.alloc(ALL_SLOTS)
    node.pages.free(slots[:PAGE_TOKENS])
    monkeypatch.setattr(allocator.time, "sleep", lambda seconds: node.arrive())
    assert page_ids(node.pages.alloc(PAGE_TOKENS)) == page_ids(slots[:PAGE_TOKENS])


def leased_and_freed(node, slots, key):
    """A page that somebody reads when it is freed."""
    node.cache.publish(frames(*page_ids(slots)), key)
    lease = node.ranks[1].peers.lease(node.ranks[1].peers.lookup(key), key)
    node.pages.free(slots)
    return lease


def test_load_when_an_evicted_page_goes_down_then_its_number_and_its_copy_are_waited_for(node, monkeypatch):
    monkeypatch.setattr(allocator, "LOAD_PATIENCE_S", 0.0)
    held = node.pages.alloc(ALL_SLOTS)[:PAGE_TOKENS]
    lease = leased_and_freed(node, held, keys(1))
    node.pages.is_copying_down = lambda: True
    steps = iter([lambda: None, node.arrive, lambda: None, lease.release])
    monkeypatch.setattr(allocator.time, "sleep", lambda seconds: next(steps)())
    assert page_ids(node.pages.alloc(PAGE_TOKENS)) == page_ids(held)


@pytest.mark.parametrize("is_in_step", [False, True])
def test_load_when_numbers_come_behind_a_long_forward_then_it_waits_unless_all_ranks_would(
    node, monkeypatch, is_in_step
):
    monkeypatch.setattr(allocator, "LOAD_PATIENCE_S", 0.0)
    node.pages.is_in_step = is_in_step
    slots = node.pages.alloc(ALL_SLOTS)
    node.pages.free(slots[:PAGE_TOKENS])
    monkeypatch.setattr(allocator.time, "sleep", lambda seconds: node.arrive())
    assert (node.pages.alloc(PAGE_TOKENS) is None) == is_in_step


def test_load_when_a_copy_down_was_broken_off_then_what_it_holds_is_not_waited_for_again(node, monkeypatch):
    now_s = [0.0]

    def sleep(seconds):
        now_s[0] += seconds
        node.arrive()

    for user in (allocator, quarantine):
        monkeypatch.setattr(user, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    slots = node.pages.alloc(ALL_SLOTS)
    lease = leased_and_freed(node, slots[:PAGE_TOKENS], keys(1))
    node.come()
    node.pages.is_copying_down = lambda: True
    now_s[0] = began_s = 2 * quarantine.OLD_S
    node.pages.free(slots[PAGE_TOKENS : 2 * PAGE_TOKENS])
    assert node.pages.alloc(2 * PAGE_TOKENS) is None and now_s[0] - began_s < quarantine.OLD_S / 2
    lease.release()


def test_clear_when_numbers_are_on_their_way_then_every_page_is_free_once(node):
    node.pages.free(node.pages.alloc(5 * PAGE_TOKENS))
    node.cache.reset()
    node.pages.clear()
    assert node.pages.available_size() == ALL_SLOTS
    node.gpu.streams.clear()
    assert sorted(node.pages.get_all_free_pages().tolist()) == list(range(1, NUM_FRAMES))


def test_free_when_no_cache_is_attached_then_as_upstream(node):
    plain = DeviceAllocator(
        size=ALL_SLOTS, page_size=PAGE_TOKENS, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False
    )
    plain.free(plain.alloc(PAGE_TOKENS))
    assert plain.available_size() == ALL_SLOTS


@pytest.mark.parametrize("is_read", [False, True])
def test_alloc_when_numbers_come_late_then_others_are_evicted_for_what_readers_hold_and_for_nothing_else(
    node, monkeypatch, is_read
):
    """What is on its way comes behind this rank's own forward: no reader has it, and what else goes comes there too."""
    monkeypatch.setattr(quarantine, "OLD_S", 0.01)
    monkeypatch.setattr(quarantine, "CIRCLE_S", 0.02)
    done = []
    node.pages._evict_for_held = lambda: done.append("evicted")
    node.pages.let_peers_go = lambda: done.append("given up") or 0
    slots = node.pages.alloc(ALL_SLOTS)
    if is_read:
        held = slots[:PAGE_TOKENS]
        node.cache.publish(frames(*page_ids(held)), keys(1))
        lease = node.ranks[1].peers.lease(node.ranks[1].peers.lookup(keys(1)), keys(1))
        node.pages.free(held)
        node.come()
    node.pages.free(slots[PAGE_TOKENS : 2 * PAGE_TOKENS])
    assert node.pages._when_readers_let_go(lambda: None, 0.05) is None
    assert done == (["evicted", "given up"] if is_read else [])
    if is_read:
        lease.release()


def test_alloc_when_a_page_that_comes_late_is_read_then_others_go_before_fetches_are_given_up(node, monkeypatch):
    now_s, comes_s, done = [0.0], (quarantine.OLD_S + quarantine.CIRCLE_S) / 2, []
    node.pages._evict_for_held = lambda: done.append("evicted")
    node.pages.let_peers_go = lambda: done.append("given up") or 0
    held = node.pages.alloc(ALL_SLOTS)[:PAGE_TOKENS]
    node.cache.publish(frames(*page_ids(held)), keys(1))
    lease = node.ranks[1].peers.lease(node.ranks[1].peers.lookup(keys(1)), keys(1))
    node.pages.free(held)

    def sleep(seconds):
        now_s[0] += seconds
        if now_s[0] > comes_s:
            node.come()

    def allocate():
        return torch.zeros(1) if "evicted" in done else None

    monkeypatch.setattr(quarantine, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    assert node.pages._when_readers_let_go(allocate, quarantine.READER_PATIENCE_S) is not None and done == ["evicted"]
    lease.release()


class Tree:
    """What SGLang keeps of past requests, the oldest first."""

    def __init__(self, pages):
        self.pages, self.kept = pages, []

    def supports_prefix_sharing(self):
        return True

    def evict_for_alloc(self, params):
        wanted = params.num_tokens
        while wanted > 0 and self.kept:
            slots = self.kept.pop(0)
            self.pages.free_segment(slots, start_pos=0)
            wanted -= len(slots)


def serve_until_the_pool_is_full(node, num_steps):
    """Prefills of two pages, scheduled as SGLang does: each while the one before it runs. A freed page's number comes
    behind the forward that runs when it is freed."""
    pages, tree, done = node.pages, Tree(node.pages), []
    for step in range(num_steps):
        node.events = [node.driver.create_event()]
        node.driver.record_event(node.events[0], FORWARD)
        pages.evict_to_free_tokens(tree, 2 * PAGE_TOKENS)
        slots = pages.alloc(2 * PAGE_TOKENS)
        assert slots is not None
        tree.kept.append(slots)
        done.append(False)
        node.gpu.enqueue(FORWARD, lambda: None, lambda step=step: done[step])
        for tensor in pages._lane.tags():
            node.gpu.memory[tensor.data_ptr()] = bytearray(tensor.nbytes)
        # The forward before this one has ended, and its results are being processed.
        done[:step] = [True] * step
        while node.gpu.step():
            pass
        pages.poll()


def test_alloc_when_the_pool_is_full_then_no_step_waits_for_the_forward_in_flight(monkeypatch):
    monkeypatch.setattr(allocator.time, "sleep", lambda seconds: pytest.fail("the scheduler waits"))
    node = Node(Reserve(2 * PAGE_TOKENS))
    serve_until_the_pool_is_full(node, 30)
    assert node.pages.wait_us == 0


def test_load_when_the_pool_is_full_and_one_as_long_came_before_then_it_does_not_wait(monkeypatch):
    """SGLang evicts for a fetch when it needs the pages: what is free by then was evicted a step before."""
    sleeps = []
    monkeypatch.setattr(allocator.time, "sleep", lambda seconds: sleeps.append(seconds) or node.arrive())
    node = Node(Reserve(2 * PAGE_TOKENS, most_tokens=6 * PAGE_TOKENS))
    tree = Tree(node.pages)
    tree.kept = list(node.pages.alloc(ALL_SLOTS).split(PAGE_TOKENS))

    def load():
        tree.evict_for_alloc(SimpleNamespace(num_tokens=6 * PAGE_TOKENS - node.pages.available_size()))
        tree.kept += node.pages.alloc(6 * PAGE_TOKENS).split(PAGE_TOKENS)
        return len(sleeps)

    assert load() > 0, "nobody knew that it would come"
    num_sleeps = len(sleeps)
    node.pages.evict_to_free_tokens(tree, PAGE_TOKENS)
    node.come()
    assert load() == num_sleeps


def test_alloc_when_nothing_is_kept_in_reserve_then_the_full_pool_makes_it_wait(monkeypatch):
    def wait(seconds):
        raise TimeoutError

    monkeypatch.setattr(allocator.time, "sleep", wait)
    with pytest.raises(TimeoutError):
        serve_until_the_pool_is_full(Node(), 30)
