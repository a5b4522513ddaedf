# SPDX-License-Identifier: Apache-2.0
"""The quarantine in SGLang's own allocator, over the real native core: two ranks in one process."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from test.unit.cache_rig import make_cache, request
from test.unit.directory.rig import NUM_FRAMES, Rank, frames, keys

from banyan import _native
from banyan._native import RankTable
from banyan.layout import Layout
from banyan.sglang_plugin.pools import allocator as module
from banyan.sglang_plugin.pools import quarantine
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.host_access import HostAccess
from banyan.sglang_plugin.rank import times

PAGE_TOKENS = 4


def make_allocator(cache):
    pages = QuarantiningAllocator(
        size=(NUM_FRAMES - 1) * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=None,
        need_sort=False,
    )
    pages.attach(cache)
    return pages


@pytest.fixture
def node():
    rank_table = RankTable.create(2)
    ranks = [Rank(rank_table, slot) for slot in range(2)]
    cache = make_cache(ranks[0].frame_table, ranks[0].peers)
    return make_allocator(cache), cache, ranks[1].peers, rank_table, ranks


def page_ids(slots):
    return (slots[::PAGE_TOKENS] // PAGE_TOKENS).tolist()


def for_prefill(pages, num_tokens):
    """Slots for a prompt of which nothing is cached."""
    nothing, all_of_it = torch.tensor([0]), torch.tensor([num_tokens])
    return pages.alloc_extend(
        prefix_lens=nothing,
        prefix_lens_cpu=nothing,
        seq_lens=all_of_it,
        seq_lens_cpu=all_of_it,
        last_loc=torch.tensor([-1]),
        extend_num_tokens=num_tokens,
    )


def test_free_when_nobody_reads_then_the_page_is_free_at_once(node):
    pages, cache, *_ = node
    slots = pages.alloc(2 * PAGE_TOKENS)
    cache.publish(frames(*page_ids(slots)), keys(1, 2))
    before = pages.available_size()
    pages.free(slots)
    assert pages.available_size() == before + 2 * PAGE_TOKENS
    assert pages.get_all_free_pages().unique().numel() == NUM_FRAMES - 1


def test_free_when_its_keys_go_to_other_pages_within_a_group_then_peers_find_those(node):
    """SGLang does so where a node's window is filled again."""
    pages, cache, peers, *_ = node
    old, new = pages.alloc(PAGE_TOKENS), pages.alloc(PAGE_TOKENS)
    cache.publish(frames(*page_ids(old)), keys(1))
    pages.free_group_begin()
    pages.free_segment(old, start_pos=0)
    cache.publish(frames(*page_ids(new)), keys(1))
    pages.free_group_end()
    assert peers.lease(peers.lookup(keys(1)), keys(1)) is not None
    assert pages.get_all_free_pages().unique().numel() == NUM_FRAMES - 2


def test_idle_rank_when_a_reader_has_let_go_then_the_next_step_takes_its_page_back(node):
    """Also where no allocation is short, and none may come: it was held, and counted as held, until one came."""
    pages, cache, peers, _, (own, _) = node
    access = HostAccess(pool=None, page_tokens=PAGE_TOKENS, rank_table=None, member_slots=None)
    access.guard(pages, cache)
    slots = pages.alloc(PAGE_TOKENS)
    cache.publish(frames(*page_ids(slots)), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots)
    access.poll()
    assert (own.frame_table.num_quarantined, pages._num_held) == (1, 1)
    lease.release()
    access.poll()
    assert (own.frame_table.num_quarantined, pages._num_held) == (0, 0)
    assert pages.get_all_free_pages().unique().numel() == NUM_FRAMES - 1


def test_pages_when_all_were_withdrawn_under_a_reader_then_only_what_sglang_freed_is_handed_out_again(node):
    """A flush that was refused withdraws pages that SGLang keeps: they leave the frame table's quarantine too."""
    pages, cache, peers, _, (own, _) = node
    slots = pages.alloc(3 * PAGE_TOKENS)
    cache.publish(frames(*page_ids(slots)), keys(1, 2, 3))
    lease = peers.lease(peers.lookup(keys(1, 2, 3)), keys(1, 2, 3))
    cache.reset()
    assert own.frame_table.num_quarantined == 3
    pages.free(slots[:PAGE_TOKENS])
    lease.release()
    pages.poll()
    free = pages.get_all_free_pages().tolist()
    assert set(page_ids(slots)) & set(free) == set(page_ids(slots[:PAGE_TOKENS]))
    assert len(free) == len(set(free)) == NUM_FRAMES - 3
    pages.free(slots[PAGE_TOKENS:])
    assert pages.get_all_free_pages().unique().numel() == NUM_FRAMES - 1


class Failing:
    """A frame table that fails to withdraw once, and then to tell what has been let go."""

    def __init__(self):
        self.fails = True

    def retire(self, asked):
        if self.fails:
            raise OSError("retire")
        return asked.tobytes()

    def drain(self):
        self.fails = not self.fails
        if self.fails:
            raise OSError("drain")
        return b""


def test_page_when_the_frame_table_fails_once_each_way_then_it_is_free_in_the_end(node):
    pages, *_ = node
    slots, table = pages.alloc(PAGE_TOKENS), Failing()
    pages.attach(table)
    pages.free(slots)
    assert pages._num_held == 1
    for _ in range(3):
        pages.poll()
    assert pages._num_held == 0
    assert pages.get_all_free_pages().unique().numel() == NUM_FRAMES - 1


def test_free_when_a_peer_reads_then_the_page_counts_but_is_not_handed_out(node):
    pages, cache, peers, *_ = node
    slots = pages.alloc(PAGE_TOKENS)
    (page,) = page_ids(slots)
    cache.publish(frames(page), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free_segment(slots, start_pos=0)
    assert pages.available_size() == (NUM_FRAMES - 1) * PAGE_TOKENS
    assert sorted(pages.get_all_free_pages().tolist()) == list(range(1, NUM_FRAMES))
    others = pages.alloc((NUM_FRAMES - 2) * PAGE_TOKENS)
    assert page not in page_ids(others)
    lease.release()
    assert page_ids(pages.alloc(PAGE_TOKENS)) == [page]


def test_alloc_when_the_pool_is_short_then_it_waits_for_the_reader(node, monkeypatch):
    monkeypatch.setattr(module, "LOAD_PATIENCE_S", quarantine.READER_PATIENCE_S)
    pages, cache, peers, *_ = node
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    threading.Timer(0.05, lease.release).start()
    assert page_ids(pages.alloc(PAGE_TOKENS)) == [5]


def test_alloc_when_a_reader_never_lets_go_then_it_fails_after_its_patience(node, monkeypatch, caplog):
    pages, cache, peers, *_ = node
    for user in (module, quarantine):
        monkeypatch.setattr(user, "READER_PATIENCE_S", 0.02)
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    assert for_prefill(pages, PAGE_TOKENS) is None
    assert "peers have held 1 page(s)" in caplog.text
    with pytest.raises(RuntimeError, match="peers have held 1 page"):
        pages.wait_for_readers()
    lease.release()


def test_patience_when_a_readers_drive_stalls_and_its_forward_is_long_then_it_is_longer_than_both():
    """A page that a reader will let go of must not end the server: 128k tokens at once take over 10 s."""
    drive_stalls_s = float(_native.Store.open.__text_signature__.partition("stall_s=")[2].rstrip(")"))
    assert drive_stalls_s + 30 <= quarantine.READER_PATIENCE_S


def test_load_when_readers_would_make_all_ranks_wait_then_it_gives_up_before_others_do(node, monkeypatch):
    pages, cache, peers, *_ = node
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    assert pages._num_held == 1
    monkeypatch.setattr(module, "LOAD_PATIENCE_S", 0.0)
    assert pages.alloc(PAGE_TOKENS) is None
    threading.Timer(0.05, lease.release).start()
    prefill = for_prefill(pages, PAGE_TOKENS)
    assert page_ids(prefill) == [5], "a prefill that gets no page would end the server"


def test_load_when_pages_are_on_their_way_down_then_it_waits_for_them_and_not_for_readers(node, monkeypatch):
    pages, cache, peers, *_ = node
    monkeypatch.setattr(module, "LOAD_PATIENCE_S", 0.0)
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5, 6), keys(1, 2))
    down, read = (peers.lease(peers.lookup(key), key) for key in (keys(1), keys(2)))
    pages.free(slots[4 * PAGE_TOKENS : 6 * PAGE_TOKENS])
    copying = [True]
    pages.is_copying_down = lambda: copying[0]
    threading.Timer(0.05, lambda: (down.release(), copying.clear(), copying.append(False))).start()
    assert page_ids(pages.alloc(PAGE_TOKENS)) == [5]
    began_s = time.monotonic()
    assert pages.alloc(PAGE_TOKENS) is None and time.monotonic() < began_s + quarantine.CIRCLE_S
    read.release()


def test_load_when_copies_down_end_one_after_the_other_then_it_waits_for_all_of_them(node, monkeypatch):
    """Together they take longer than one that does not end is waited for."""
    pages, cache, peers, *_ = node
    monkeypatch.setattr(module, "LOAD_PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "OLD_S", 0.2)
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(4, 5, 6), keys(1, 2, 3))
    leases = [peers.lease(peers.lookup(key), key) for key in (keys(1), keys(2), keys(3))]
    pages.free(slots[3 * PAGE_TOKENS : 6 * PAGE_TOKENS])
    pages.is_copying_down = lambda: bool(leases)

    def end_one():
        leases[-1].release()
        leases.pop()

    for number in range(1, 4):
        threading.Timer(0.12 * number, end_one).start()
    assert sorted(page_ids(pages.alloc(3 * PAGE_TOKENS))) == [4, 5, 6]


def test_pages_when_many_are_freed_one_by_one_while_they_are_read_then_each_costs_the_same():
    """As leaves are, where each goes down: what is held already is not gone through again."""

    class Held:
        def retire(self, frames):
            return b""

        def drain(self):
            return b""

    class Slots(quarantine.Quarantine):
        device = "cpu"

    slots = Slots()
    slots.attach(Held())
    kept = slots._quarantine
    for frame in range(100):
        slots._withdraw(frames(frame), torch.tensor([frame]))
    assert slots._quarantine is kept and len(kept) == 100


def test_load_when_a_copy_down_does_not_end_then_it_is_given_up(node, monkeypatch):
    pages, cache, peers, *_ = node
    for user in (module, quarantine):
        monkeypatch.setattr(user, "CIRCLE_S", 0.02)
    monkeypatch.setattr(module, "LOAD_PATIENCE_S", 0.0)
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    pages.is_copying_down = lambda: True
    assert pages.alloc(PAGE_TOKENS) is None
    lease.release()
    assert page_ids(pages.alloc(PAGE_TOKENS)) == [5]


def test_load_when_another_shard_got_no_pages_then_these_come_back_and_all_compute(node):
    pages, *_ = node
    asked = []
    pages.agreed = lambda granted: asked.append(granted) or False
    before = pages.available_size()
    assert pages.alloc(PAGE_TOKENS) is None and asked == [True]
    assert pages.available_size() == before
    taken = for_prefill(pages, before)
    assert len(set(page_ids(taken))) == NUM_FRAMES - 1, "what is computed into needs no agreement"
    assert pages.alloc(PAGE_TOKENS) is None and asked == [True, False], "the others wait for its answer"


class TwoShards:
    """What the two shards of a rank say to each other, each in a thread of its own."""

    is_one = False

    def __init__(self):
        self._barrier, self._said = threading.Barrier(2, timeout=quarantine.READER_PATIENCE_S / 4), []

    def all(self, granted):
        self._said.append(granted)
        self._barrier.wait()
        verdict = all(self._said)
        if self._barrier.wait() == 0:
            self._said.clear()
        self._barrier.wait()
        return verdict


WHOLE = SimpleNamespace(all=lambda granted: granted, is_one=True)


def two_ranks(num_shards):
    """Caches, full pools and their slots of two ranks, shards of the first before those of the second. Each has queued
    a page of the other's, and freed the page of its own that the other has leased."""
    num_members = 2 * num_shards
    rank_table = RankTable.create(num_members)
    others = [(slot + num_shards) % num_members for slot in range(num_members)]
    caches = []
    for slot, other in enumerate(others):
        member = Rank(rank_table, slot)
        caches.append(
            make_cache(
                member.frame_table,
                member.peers,
                slot=slot,
                slots=[other],
                layout=Layout(dp=num_members, attn_dp=1, attn_cp=1, attn_tp=1),
            )
        )
    pools = [make_allocator(cache) for cache in caches]
    taken = [pool.alloc((NUM_FRAMES - 1) * PAGE_TOKENS) for pool in pools]
    for number, cache in enumerate(caches):
        cache.publish(frames(5), keys(number))
    for number, cache in enumerate(caches):
        rid, wanted = f"request {number}", keys(others[number])
        assert cache.prepare(request(rid), wanted).num_pages == 1
        assert cache.admit(rid, wanted, frames(9)) is not None
    for pool, slots in zip(pools, taken, strict=True):
        pool.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    return caches, pools, taken


def load_at_once(pools):
    """What each gets, a page each."""
    loaded = {}

    def load(number, pool):
        loaded[number] = pool.alloc(PAGE_TOKENS)

    threads = [threading.Thread(target=load, args=one, daemon=True) for one in enumerate(pools)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=quarantine.READER_PATIENCE_S / 4)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    return [loaded[number] for number in range(len(pools))]


def test_loads_when_two_ranks_lease_from_each_other_and_both_pools_are_full_then_neither_waits_for_the_other():
    caches, pools, _ = two_ranks(num_shards=1)
    for cache, pool in zip(caches, pools, strict=True):
        times.allocate_without_circles(cache, WHOLE, [pool])
    assert load_at_once(pools) == [None, None]
    for cache in caches:
        assert cache.finish(cache.start()), "what was leased is copied all the same"
    assert [page_ids(pool.alloc(PAGE_TOKENS)) for pool in pools] == [[5], [5]]


def test_loads_when_one_shard_of_each_rank_is_short_then_both_shards_compute_and_no_page_is_lost():
    caches, pools, taken = two_ranks(num_shards=2)
    shards = [TwoShards(), TwoShards()]
    for number, (cache, pool) in enumerate(zip(caches, pools, strict=True)):
        times.allocate_without_circles(cache, shards[number // 2], [pool])
    for number in (1, 2):
        pools[number].free(taken[number][:PAGE_TOKENS])
    before = [pool.available_size() for pool in pools]
    assert load_at_once(pools) == [None] * 4, "two had a page, and their other shards had none"
    assert [pool.available_size() for pool in pools] == before
    for cache in caches:
        assert cache.finish(cache.start())
    assert all(slots is not None for slots in load_at_once(pools))


def test_clear_when_a_peer_reads_then_its_page_stays_out(node):
    pages, cache, peers, *_ = node
    slots = pages.alloc(3 * PAGE_TOKENS)
    held = page_ids(slots)[1]
    cache.publish(frames(*page_ids(slots)), keys(1, 2, 3))
    match = peers.lookup(keys(2))
    lease = peers.lease(match, keys(2))
    cache.reset()
    pages.clear()
    assert held not in pages.free_pages.tolist()
    assert pages.available_size() == (NUM_FRAMES - 1) * PAGE_TOKENS
    lease.release()
    pages.wait_for_readers()
    assert held in pages.free_pages.tolist()


def test_free_group_when_it_ends_then_every_page_was_withdrawn(node):
    pages, cache, peers, *_ = node
    slots = pages.alloc(2 * PAGE_TOKENS)
    cache.publish(frames(*page_ids(slots)), keys(1, 2))
    pages.free_group_begin()
    pages.free(slots)
    assert peers.lookup(keys(1, 2)).num_pages == 2
    pages.free_group_end()
    assert peers.lookup(keys(1, 2)).num_pages == 0


def test_alloc_extend_and_decode_when_the_pool_is_short_then_they_wait_too(node):
    pages, cache, peers, *_ = node
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    for name, arguments in (
        (
            "alloc_extend",
            (torch.tensor([0]), torch.tensor([0]), torch.tensor([3]), torch.tensor([3]), torch.tensor([-1]), 3),
        ),
        ("alloc_decode", (torch.tensor([1]), torch.tensor([1]), torch.tensor([-1]))),
    ):
        cache.publish(frames(5), keys(name == "alloc_decode"))
        lease = peers.lease(peers.lookup(keys(name == "alloc_decode")), keys(name == "alloc_decode"))
        pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
        threading.Timer(0.05, lease.release).start()
        assert getattr(pages, name)(*arguments)[0].item() // PAGE_TOKENS == 5


@pytest.mark.parametrize(("num_shards", "num_evicted"), [(1, PAGE_TOKENS), (2, 0)])
def test_eviction_when_a_reader_has_held_a_page_for_long_then_others_go_in_its_place(
    node, monkeypatch, num_shards, num_evicted
):
    pages, cache, peers, *_ = node
    pages.is_whole_rank = num_shards == 1
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    asked = []
    tree = SimpleNamespace(
        supports_prefix_sharing=lambda: True, evict_for_alloc=lambda params: asked.append(params.num_tokens)
    )
    pages.evict_to_free_tokens(tree, PAGE_TOKENS)
    assert not asked, "a copy ends by itself"
    monkeypatch.setattr(module, "OLD_S", -1.0)
    pages.evict_to_free_tokens(tree, PAGE_TOKENS)
    assert sum(asked) == num_evicted
    lease.release()


def test_eviction_when_a_page_is_missing_then_as_many_go_as_are_to_go_at_once(node):
    pages, *_ = node
    pages.least_evicted_tokens = 3 * PAGE_TOKENS
    asked = []
    tree = SimpleNamespace(
        supports_prefix_sharing=lambda: True, evict_for_alloc=lambda params: asked.append(params.num_tokens)
    )
    pages.evict_to_free_tokens(tree, pages.available_size())
    assert asked == []
    pages.evict_to_free_tokens(tree, pages.available_size() + PAGE_TOKENS)
    assert asked[0] == 3 * PAGE_TOKENS and not pages.has_what_it_needs
    pages.evict_to_free_tokens(tree, pages.available_size() + 5 * PAGE_TOKENS)
    assert asked[-1] == 5 * PAGE_TOKENS


class Evicting:
    """SGLang's tree, with one page that nobody uses."""

    def __init__(self, pages, slots):
        self._pages, self._slots = pages, slots

    def supports_prefix_sharing(self):
        return True

    def evict_for_alloc(self, params):
        if self._slots is not None and params.num_tokens:
            self._pages.free(self._slots)
            self._slots = None


def test_load_when_a_page_has_been_held_for_long_already_then_another_is_evicted_at_once(node, monkeypatch):
    pages, cache, peers, *_ = node
    monkeypatch.setattr(quarantine, "OLD_S", -1.0)
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    pages.evict_from(Evicting(pages, slots[:PAGE_TOKENS]), "num_tokens")
    monkeypatch.setattr(module, "LOAD_PATIENCE_S", 0.0)
    assert page_ids(pages.alloc(PAGE_TOKENS)) == [1]
    lease.release()
    assert page_ids(pages.alloc(PAGE_TOKENS)) == [5], "it has been let go of, if nobody waits for it"


@pytest.mark.parametrize("num_shards", [1, 2])
def test_prefill_when_a_reader_does_not_let_go_then_another_page_is_evicted_instead_of_waiting_for_ever(
    node, monkeypatch, num_shards
):
    """Two ranks whose readers wait for each other would stand still, and end their server."""
    pages, cache, peers, *_ = node
    pages.is_whole_rank = num_shards == 1
    monkeypatch.setattr(quarantine, "OLD_S", 0.01)
    monkeypatch.setattr(module, "READER_PATIENCE_S", 0.05)
    slots = pages.alloc((NUM_FRAMES - 1) * PAGE_TOKENS)
    tree = Evicting(pages, slots[5 * PAGE_TOKENS : 6 * PAGE_TOKENS])
    pages.evict_to_free_tokens(tree, 0)
    cache.publish(frames(5), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots[4 * PAGE_TOKENS : 5 * PAGE_TOKENS])
    one_page = (torch.tensor([0]), torch.tensor([0]), torch.tensor([3]), torch.tensor([3]), torch.tensor([-1]), 3)
    found = pages.alloc_extend(*one_page)
    # The shards of a rank would have to evict alike.
    assert (found is not None) == (num_shards == 1)
    assert found is None or found[0].item() // PAGE_TOKENS == 6
    lease.release()


def test_prefill_when_a_reader_has_held_a_page_for_long_then_nothing_is_planned_with_it(node, monkeypatch):
    pages, cache, peers, *_ = node
    monkeypatch.setattr(module, "OLD_S", 0.0)
    left_out = []
    monkeypatch.setattr(times.prefill, "leave_out", left_out.append)
    times.allocate_without_circles(cache, WHOLE, [pages])
    slots = pages.alloc(PAGE_TOKENS)
    cache.publish(frames(*page_ids(slots)), keys(1))
    lease = peers.lease(peers.lookup(keys(1)), keys(1))
    pages.free(slots)
    assert left_out[0]() == [PAGE_TOKENS]
    monkeypatch.setattr(module, "OLD_S", 60.0)
    assert left_out[0]() == [0], "a copy takes milliseconds"
    lease.release()
