# SPDX-License-Identifier: Apache-2.0
"""The linker of a model with states as SGLang drives it: two ranks in one process, with SGLang's own pools."""

import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, POOL, SERVER, be_started, page, parameters_of
from test.sglang_plugin.rank.test_requests import Req
from test.unit.directory.rig import keys
from test.unit.test_restorable import NUM_LONG, Native

from banyan import _native
from banyan.config import Config
from banyan.features.states.pools import state_pool
from banyan.layout import Layout
from banyan.sglang_plugin import page_hash, runtime
from banyan.sglang_plugin.pools import quarantine
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool, SharedMLAPool
from banyan.sglang_plugin.rank import hooks, identity, requests
from banyan.sglang_plugin.rank import linker as module
from banyan.sglang_plugin.rank.linker import BanyanLinker

INIT = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool._init_mamba_pool"
FILL = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.cleanup_after_caching_req"
MATCH = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent.finalize_match_result_in_cache"
NUM_SLOTS, TOKENS, NUM_STATES = 8, 64, 12
LINEAR, FULL = [0, 2], [1, 3]
NUM_LAYERS = len(LINEAR) + len(FULL)


def make_slots(*, strategy=True, **more):
    """SGLang's own pool of requests, whose states have something in them."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=2, num_heads=4, head_dim=8, state_size=8, conv_kernel=4
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    slots = HybridReqToTokenPool(
        size=4,
        mamba_size=NUM_STATES,
        mamba_spec_state_size=4,
        max_context_len=TOKENS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=LINEAR, dtype=dtype),
        mamba_layer_ids=LINEAR,
        enable_mamba_extra_buffer=strategy,
        enable_overlap_schedule=False,
        **more,
    )
    for tensor in tensors_of(slots):
        tensor.copy_(torch.randn(tensor.shape))
    return slots


def tensors_of(slots):
    cache = slots.mamba_pool.mamba_cache
    return [cache.temporal, *cache.conv]


def shared_slots(monkeypatch, *, is_on_gpu=False, **more):
    """The same, with the hook of the patch queue on it."""
    with monkeypatch.context() as patched:
        patched.setattr(state_pool.runtime, "is_sharing", lambda: True)
        patched.setattr(state_pool.runtime, "is_on_gpu", lambda: is_on_gpu)
        patched.setattr(state_pool.runtime, "config", lambda: None)
        wrapped = hooked(INIT, HybridReqToTokenPool._init_mamba_pool)
        patched.setattr(HybridReqToTokenPool, "_init_mamba_pool", wrapped)
        return make_slots(**more)


def parameters(slots, *, drafts=(), latents=None):
    kwargs = {name: value for name, value in POOL.items() if name not in ("size", "layer_num", "enable_alt_stream")}
    pool = HybridLinearKVPool(
        size=TOKENS,
        full_attention_layer_ids=FULL,
        mamba_pool=slots.mamba_pool,
        full_kv_pool_class=SharedMHAPool if latents is None else SharedMLAPool,
        **kwargs,
        **(latents or {}),
    )
    full = pool.full_kv_pool
    for buffer in (*full.k_buffer, *full.v_buffer) if latents is None else full.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    allocator = QuarantiningAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", pool, False)
    return parameters_of(allocator, PAGE, drafts=drafts, req_to_token_pool=slots)


class StateRank:
    def __init__(self, monkeypatch, rank_table, rank, config, slots=None, *, algorithm=None, shard=0, **more):
        slots = shared_slots(monkeypatch) if slots is None else slots
        tokens_ahead = page_hash.tokens_ahead(algorithm, has_states=True)
        be_started(monkeypatch, rank_table, rank, config, shard=shard, tokens_ahead=tokens_ahead)
        params = parameters(slots, **more)
        params.is_eagle = algorithm == "EAGLE"
        self.allocator, self.slots = params.token_to_kv_pool_allocator, slots
        self.pool = self.allocator.get_kvcache().full_kv_pool
        self.linker = BanyanLinker(
            SERVER, params, components={ComponentType.FULL, ComponentType.MAMBA}, extra_config={}
        )

    def offload(self, names, *, with_state=True):
        """A node of SGLang's tree, with the state at its end; where both lie."""
        full, state = self.allocator.alloc(len(names) * PAGE), None
        transfers = [transfer(names, full)]
        if with_state:
            state = self.slots.mamba_allocator.alloc(1)
            transfers.append(transfer(names[-1:], state))
        assert self.linker.offload(transfers) and self.linker.num_completed_offloads() == 1
        assert self.linker.pop_completed_offload()
        return full, state

    def lookup(self, names, rid="r"):
        return self.linker.lookup(rid, [transfer(names, None), transfer(names[-1:], None)])

    def load(self, names, rid="r"):
        """Where the pages and the state went, or None."""
        full, state = self.allocator.alloc(len(names) * PAGE), self.slots.mamba_allocator.alloc(1)
        if not self.linker.load(rid, [transfer(names, full), transfer(names[-1:], state)]):
            return None
        return full, state

    def land(self):
        """As a forward does it: each layer waits through the pool that it reads."""
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(NUM_LAYERS):
            if layer in LINEAR:
                self.slots.mamba2_layer_cache(layer)
            else:
                self.linker.layer_done_counter.wait_until(layer)
        return self.linker.finish_layer_wise_loading(index)

    def pages(self, slots):
        return page(self.pool, slots)

    def state(self, slot):
        """All parts of all layers."""
        return [tensor[:, slot].clone() for tensor in tensors_of(self.slots)]

    def until(self, condition):
        """Scheduling steps, until something has come of them."""
        deadline_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline_s
            self.linker.num_completed_offloads()
            time.sleep(0.001)


def transfer(names, slots):
    return SimpleNamespace(keys=names, device_indices=slots)


def are_equal(one, other):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


def two_ranks(monkeypatch, host_gb=0.0):
    rank_table = _native.RankTable.create(NUM_SLOTS)
    config = Config(min_fetch_tokens=PAGE, host_gb=host_gb)
    return [StateRank(monkeypatch, rank_table, rank, config) for rank in (0, 1)]


@pytest.fixture(params=[0.0, 0.001, None], ids=["pools", "pools and arena", "arena sized at the start"])
def ranks(monkeypatch, request):
    return two_ranks(monkeypatch, request.param)


def test_pool_when_states_are_shared_then_they_are_as_sglang_makes_them(monkeypatch):
    theirs, ours = make_slots(), shared_slots(monkeypatch)
    for one, other in zip(tensors_of(theirs), tensors_of(ours), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    ours.mamba_pool.clear_slots(torch.tensor([3]))
    ours.copy_mamba_state(torch.tensor([3]), torch.tensor([4]))
    assert all(not tensor[:, 4].any() and tensor[:, 5].any() for tensor in tensors_of(ours))
    assert ours.mamba_allocator.available_size() == theirs.mamba_allocator.available_size() == NUM_STATES


def test_linker_when_a_model_has_states_then_sglang_is_told_that_it_keeps_both_pools(ranks):
    assert set(ranks[0].linker.pools) == {PoolName.KV, PoolName.MAMBA}


def test_prefix_when_one_rank_offloads_it_then_the_other_loads_pages_and_the_state(ranks):
    owner, reader = ranks
    names = keys(1, 2, 3)
    full, state = owner.offload(names)
    assert reader.lookup(names) == [3]
    own_full, own_state = reader.load(names)
    assert not are_equal(reader.state(own_state), owner.state(state))
    assert reader.land()
    assert torch.equal(reader.pages(own_full), owner.pages(full))
    assert are_equal(reader.state(own_state), owner.state(state))


def test_layer_when_its_state_is_still_to_come_then_it_waits_for_it(monkeypatch):
    reader = two_ranks(monkeypatch)[1]
    waited = []
    monkeypatch.setattr(reader.linker.layer_done_counter, "wait_until", waited.append)
    for layer in LINEAR:
        reader.slots.mamba2_layer_cache(layer)
    assert waited == LINEAR


def test_prefix_when_states_are_there_at_some_lengths_then_the_longest_of_these_is_offered(ranks):
    owner, reader = ranks
    owner.offload(keys(1, 2))
    owner.offload(keys(3, 4), with_state=False)
    assert reader.lookup(keys(1, 2, 3, 4)) == [2]
    owner.offload(keys(5, 6))
    assert reader.lookup(keys(1, 2, 3, 4, 5, 6), "s") == [6]


def test_prefix_when_no_state_is_there_then_nothing_is_offered(ranks):
    owner, reader = ranks
    owner.offload(keys(1, 2), with_state=False)
    assert reader.lookup(keys(1, 2)) == []
    assert reader.linker.counters.windowless_pages == 2


def test_state_when_it_is_freed_under_a_reader_then_its_slot_is_not_handed_out(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    _, state = owner.offload(names)
    before = owner.state(state)
    reader.lookup(names)
    _, own_state = reader.load(names)
    slots = owner.slots.mamba_allocator
    slots.free(state)
    rest = slots.alloc(NUM_STATES - 1)
    assert state.item() not in rest.tolist() and slots.available_size() == 1
    assert reader.land()
    assert slots.alloc(1).tolist() == state.tolist() and slots.available_size() == 0
    assert are_equal(reader.state(own_state), before)


def test_slots_when_some_are_read_then_only_an_allocation_that_these_would_satisfy_waits(monkeypatch):
    owner, reader = two_ranks(monkeypatch)
    names = keys(1, 2)
    _, state = owner.offload(names)
    reader.lookup(names)
    assert reader.load(names) is not None
    slots = owner.slots.mamba_allocator
    slots.free(state)
    monkeypatch.setattr(state_pool, "READER_PATIENCE_S", 0.05)
    assert slots.alloc(NUM_STATES + 1) is None and slots.wait_us == 0
    slots.alloc_group_begin(NUM_STATES)
    assert slots.wait_us == 0 and len(slots.free_slots) == NUM_STATES - 1
    slots.alloc_group_begin(NUM_STATES - 1)
    assert len(slots.free_slots) == 0
    slots.alloc_group_end()
    assert slots.available_size() == slots.schedulable_available_size() == NUM_STATES
    slots.decodes_on_held = False
    assert slots.schedulable_available_size() == NUM_STATES - 1, "ranks in step plan nothing with what is read"
    assert slots.alloc(NUM_STATES) is None and slots.wait_us > 0
    assert reader.land() and len(slots.alloc(NUM_STATES)) == NUM_STATES


class Tree:
    """What of SGLang's cache a match touches, with states that nobody uses."""

    def __init__(self, slots, unused=()):
        self.req_to_token_pool, self._unused = slots, list(unused)
        self.evicted, self.locked = [], []

    def supports_prefix_sharing(self):
        return True

    def inc_lock_ref(self, node):
        self.locked.append(node)
        return SimpleNamespace(to_dec_params=lambda: node)

    def dec_lock_ref(self, node, params):
        assert params == node
        self.locked.remove(node)

    def evict_for_alloc(self, params):
        assert self.locked == ["matched"], "what is being matched must stay"
        self.evicted.append((params.num_tokens, params.mamba_num))
        for _ in range(min(params.mamba_num, len(self._unused))):
            self.req_to_token_pool.mamba_allocator.free(self._unused.pop())

    def match(self, *, copies=True):
        """The slot that SGLang takes for a copy of the matched state."""
        original = hooked(MATCH, lambda component, params, result: self.req_to_token_pool.mamba_allocator.alloc(1))
        params, result = SimpleNamespace(cow_mamba=copies), SimpleNamespace(best_match_node="matched")
        return original(SimpleNamespace(cache=self), params, result)


def held_states(monkeypatch, number=1):
    """Slots all in use but some, which have been freed under a reader that stands still; those in use."""
    owner, reader = two_ranks(monkeypatch)
    slots, states = owner.slots.mamba_allocator, []
    for name in range(number):
        states.append(owner.offload(keys(name))[1])
        reader.lookup(keys(name), f"r{name}")
        assert reader.load(keys(name), f"r{name}") is not None
    taken = slots.alloc(NUM_STATES - number)
    for state in states:
        slots.free(state)
    return owner, reader, taken.split(1)


@pytest.mark.parametrize("old_s", [0.01, -1.0], ids=["now", "for long"])
def test_state_when_its_reader_stands_still_then_another_is_evicted_in_its_place_and_the_match_is_locked(
    monkeypatch, old_s
):
    monkeypatch.setattr(quarantine, "OLD_S", old_s)
    owner, reader, unused = held_states(monkeypatch)
    tree = Tree(owner.slots, unused[:2])
    assert tree.match().tolist() == unused[1].tolist()
    assert tree.evicted == [(0, 1)] and tree.locked == []
    assert tree.match().tolist() == unused[0].tolist()
    assert reader.land() and len(owner.slots.mamba_allocator.alloc(1)) == 1
    assert tree.match(copies=False) is None and len(tree.evicted) == 2, "nobody reads any more"


def tree_of(monkeypatch, rank, **more):
    """SGLang's own."""
    monkeypatch.setattr(mamba, "mamba_checkpoint_grid", lambda page: PAGE)
    told = SimpleNamespace(mamba_max_states_per_path=-1)
    for user in (mamba, adapter):
        monkeypatch.setattr(user, "mamba_cache_chunk_size", lambda: PAGE)
        monkeypatch.setattr(user, "get_exec", lambda: SimpleNamespace(mamba=told))
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rank.slots,
            token_to_kv_pool_allocator=rank.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            enable_mamba_extra_buffer=True,
            **more,
        )
    )


def test_keys_when_a_draft_of_eagles_kind_runs_beside_states_then_they_are_those_that_sglang_asks_for(monkeypatch):
    """Its tree and its linker make them of tokens there, whatever drafts are."""
    config = Config(min_fetch_tokens=PAGE, host_gb=0.0)
    rank = StateRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, config, algorithm="EAGLE")
    tree = tree_of(monkeypatch, rank, is_eagle=True)
    asked = Req("r", origin_input_ids=list(range(100, 101 + 4 * PAGE)))
    key, _ = RadixKey(array("q", asked.origin_input_ids)).maybe_to_bigram_view(tree.tree_core.is_eagle)
    theirs = UnifiedCacheLinkerWrapper._tail_hashes(SimpleNamespace(cache=tree), key, None, 0)
    assert requests.prompt_keys(requests.id_of(asked), PAGE) == theirs and len(theirs) == 4


def test_match_when_more_states_would_go_than_are_in_the_tree_beside_the_matched_one_then_that_stays(monkeypatch):
    """SGLang's own tree. It copies from the state that it has matched, and uses the pages before it."""
    monkeypatch.setattr(quarantine, "OLD_S", -1.0)
    name = "finalize_match_result_in_cache"
    monkeypatch.setattr(mamba.MambaComponent, name, hooked(MATCH, getattr(mamba.MambaComponent, name)))
    owner, _, (matched, other, *_) = held_states(monkeypatch, 2)
    tree = tree_of(monkeypatch, owner)
    for first, state in ((100, matched), (200, other)):
        key = RadixKey(array("q", range(first, first + PAGE)))
        tree.insert(InsertParams(key=key, value=owner.allocator.alloc(PAGE), mamba_value=state))
    req = SimpleNamespace(session=None, kv=SimpleNamespace(holds_mamba=False))
    key = RadixKey(array("q", range(100, 100 + PAGE)))
    found = tree.match_prefix(MatchPrefixParams(key=key, req=req, cow_mamba=True))
    assert found.device_prefix_len == PAGE and req.kv.mamba_cow_src_index.tolist() == matched.tolist()
    assert req.kv.mamba_pool_idx == other.item(), "of the other, which nobody had matched"
    assert tree.mamba_evictable_size() == 1 and tree.protected_size() == 0
    assert tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == PAGE


def test_state_when_a_rank_has_several_shards_then_none_evicts_alone_and_all_get_a_slot_or_none(monkeypatch):
    monkeypatch.setattr(quarantine, "OLD_S", 0.01)
    monkeypatch.setattr(state_pool, "READER_PATIENCE_S", 0.05)
    owner, _, unused = held_states(monkeypatch)
    slots, asked = owner.slots.mamba_allocator, []
    slots.agreed = lambda granted: asked.append(granted) or False
    slots.is_whole_rank = False
    tree = Tree(owner.slots, unused[:2])
    assert tree.match() is None and tree.evicted == [] and asked == [False]
    slots.free(unused[0])
    assert slots.alloc(1) is None and asked == [False, True], "another shard got none"
    slots.alloc_group_begin(1)
    assert slots.alloc(1) is None and asked == [False, True, True], "one by one or together, as it may be in each"
    slots.alloc_group_end()
    assert slots.free_slots.tolist() == unused[0].tolist()


def test_slots_when_two_ranks_wait_for_what_each_was_promised_of_the_other_then_one_gives_up_and_both_go_on(
    monkeypatch, caplog
):
    monkeypatch.setattr(quarantine, "OLD_S", 0.02)
    monkeypatch.setattr(quarantine, "CIRCLE_S", 0.1)
    ranks = two_ranks(monkeypatch)
    names = [keys(1, 2), keys(3, 4)]
    states = [rank.offload(own)[1] for rank, own in zip(ranks, names, strict=True)]
    loaded = []
    for rank, others in zip(ranks, reversed(names), strict=True):
        rank.lookup(others)
        loaded.append(rank.load(others))
    for rank, state in zip(ranks, states, strict=True):
        slots = rank.slots.mamba_allocator
        slots.free(state)
        assert len(slots.alloc(len(slots.free_slots))) == NUM_STATES - 2

    def go_on(rank):
        """The other may have to wait until this one has."""
        slot = rank.slots.mamba_allocator.alloc(1)
        return slot, rank.land()

    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        got, landed = zip(*pool.map(go_on, ranks), strict=True)
    assert [slot.tolist() for slot in got] == [state.tolist() for state in states]
    assert time.monotonic() - began_s < quarantine.READER_PATIENCE_S / 4
    assert False in landed, "what is given up fails, and SGLang computes it"
    assert "fetch(es) are given up" in caplog.text
    assert [rank.slots.mamba_allocator._num_held for rank in ranks] == [0, 0]


def test_slots_when_the_cache_is_flushed_under_a_reader_then_the_one_that_is_read_waits(ranks):
    owner, reader = ranks
    names = keys(1, 2)
    _, state = owner.offload(names)
    reader.lookup(names)
    assert reader.load(names) is not None
    owner.linker.reset()
    owner.slots.mamba_allocator.clear()
    slots = owner.slots.mamba_allocator
    assert slots.available_size() == NUM_STATES and state.item() not in slots.free_slots.tolist()
    assert reader.land()
    assert sorted(slots.alloc(NUM_STATES).tolist()) == list(range(1, NUM_STATES + 1))


def test_load_when_the_state_is_gone_then_sglang_computes_and_nothing_is_held(monkeypatch):
    owner, reader = two_ranks(monkeypatch)
    names = keys(1, 2)
    full, state = owner.offload(names)
    assert reader.lookup(names) == [2]
    owner.slots.mamba_allocator.free(state)
    assert reader.load(names) is None
    owner.allocator.free(full)
    assert owner.allocator._num_held == 0


def test_load_when_a_page_is_gone_then_the_state_is_not_held(monkeypatch):
    owner, reader = two_ranks(monkeypatch)
    names = keys(1, 2)
    full, state = owner.offload(names)
    assert reader.lookup(names) == [2]
    owner.allocator.free(full)
    assert reader.load(names) is None
    owner.slots.mamba_allocator.free(state)
    assert owner.slots.mamba_allocator._num_held == 0


def test_node_when_it_gets_a_state_later_then_it_is_offered_again_with_it(monkeypatch):
    owner, reader = two_ranks(monkeypatch)
    names = keys(1, 2)
    full, _ = owner.offload(names, with_state=False)
    state = owner.slots.mamba_allocator.alloc(1)
    nodes = {7: names, 8: []}
    tree = SimpleNamespace(
        build_external_linker_offload_transfers=lambda node: ["not offered yet"] if node == 9 else None,
        get_hash_values=lambda node: nodes[node],
        get_component_device_value=lambda node, component: {7: full, 8: full[:0]}[node],
    )
    component = SimpleNamespace(cache=SimpleNamespace(tree_core=tree, page_size=PAGE))
    monkeypatch.setattr(hooks.linker, "installed", lambda: owner.linker)
    monkeypatch.setattr(hooks.runtime, "is_sharing", lambda: True)

    def insert(node, *, found=2 * PAGE, had_one=False):
        fill = hooked(FILL, lambda component, req, is_finished, insert_result=None, insert_params=None: None)
        result = SimpleNamespace(prefix_len=found, last_device_node=node, mamba_exist=had_one)
        params = SimpleNamespace(key=range(2 * PAGE), mamba_value=state)
        fill(component, None, is_finished=True, insert_result=result, insert_params=params)

    # Without names; one that SGLang is going to offer; one that is new; one that had a state, so this one is freed.
    for number, how in enumerate(({"node": 8}, {"node": 9}, {"node": 7, "found": PAGE}, {"node": 7, "had_one": True})):
        insert(**how)
        assert reader.lookup(names, f"r{number}") == []
    insert(7)
    assert reader.lookup(names, "s") == [2]
    _, own_state = reader.load(names, "s")
    assert reader.land()
    assert are_equal(reader.state(own_state), owner.state(state))


def test_weights_when_updated_then_states_of_before_are_not_found(ranks):
    owner, reader = ranks
    owner.offload(keys(1, 2))
    for rank in (owner, reader):
        rank.linker.weights_changed()
    assert reader.lookup(keys(1, 2)) == []


def test_arena_when_the_pools_have_lost_a_prefix_then_it_has_pages_and_state(monkeypatch):
    owner, reader = two_ranks(monkeypatch, 0.001)
    names = keys(1, 2, 3)
    full, state = owner.offload(names)
    held = owner.pages(full).clone(), owner.state(state)
    owner.until(lambda: owner.linker.counters.backed_up_pages == 4)
    owner.allocator.free(full)
    owner.slots.mamba_allocator.free(state)
    assert reader.lookup(names) == [3]
    own_full, own_state = reader.load(names)
    assert reader.land()
    assert torch.equal(reader.pages(own_full), held[0])
    assert are_equal(reader.state(own_state), held[1])


def test_request_when_its_prompt_is_long_then_the_node_is_asked_for_all_states_of_it_at_once(monkeypatch):
    """When it comes, on the thread that schedules."""
    owner, _ = two_ranks(monkeypatch, 0.001)
    (states,) = owner.linker.kinds.beside
    names = keys(*range(NUM_LONG))
    owner.offload(names[:2])
    states.tier._peers = native = Native(states.tier._peers)
    assert states.restorable(names, NUM_LONG) == 2
    assert len(native.asked) == 1


def stored_in(folder):
    return Config(min_fetch_tokens=PAGE, host_gb=0.004, store=(str(folder),), store_gb=0.1, store_admit="first")


def be_asked(monkeypatch, names):
    """A server with a store, whose requests ask for these pages."""
    monkeypatch.setattr(runtime, "refuse", lambda *lines: pytest.fail(str(lines)))
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: names)
    monkeypatch.setattr(module.requests, "is_of_this_server", lambda request: False)


def test_store_when_a_server_has_ended_then_the_next_one_has_its_pages_and_state(monkeypatch, tmp_path):
    names = keys(1, 2, 3)

    def begin():
        slots = shared_slots(monkeypatch)
        be_asked(monkeypatch, names)
        return StateRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, stored_in(tmp_path / "s"), slots)

    first = begin()
    first.linker.arrive("learnt")
    full, state = first.offload(names)
    held = first.pages(full).clone(), first.state(state)
    first.until(lambda: first.linker.counters.archived_pages == 4)
    first.linker.close()

    second = begin()
    second.linker.arrive("r")
    assert second.lookup(names) == [3]
    own_full, own_state = second.load(names)
    assert second.land()
    assert torch.equal(second.pages(own_full), held[0])
    assert are_equal(second.state(own_state), held[1])
    second.linker.close()


TWO_SHARDS = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=2)


def shards_of_latents(monkeypatch, config, ranks=(0, 1)):
    """Of each rank two shards. Both have all of the latents, of which the first keeps them; and each its own states."""
    monkeypatch.setattr(rig, "LAYOUT", TWO_SHARDS)
    rank_table = _native.RankTable.create(TWO_SHARDS.num_slots_with_windows)
    latents = {"use_mla": True, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    return [
        [StateRank(monkeypatch, rank_table, rank, config, shard=shard, latents=latents) for shard in (0, 1)]
        for rank in ranks
    ]


def test_arena_when_one_shard_keeps_the_latents_of_all_then_each_keeps_its_states(monkeypatch):
    """SGLang takes no length that one shard lacks."""
    owners, readers = shards_of_latents(monkeypatch, Config(min_fetch_tokens=PAGE, host_gb=0.008))
    names = keys(1, 2, 3)
    placed = [owner.offload(names) for owner in owners]
    states = [owner.state(state) for owner, (_, state) in zip(owners, placed, strict=True)]
    for owner, num_pages, (full, state) in zip(owners, (4, 1), placed, strict=True):
        owner.until(lambda: owner.linker.counters.backed_up_pages == num_pages)  # noqa: B023
        owner.allocator.free(full)
        owner.slots.mamba_allocator.free(state)
    for reader, theirs in zip(readers, states, strict=True):
        assert reader.lookup(names) == [3]
        _, own_state = reader.load(names)
        assert reader.land()
        assert are_equal(reader.state(own_state), theirs)


def test_store_when_one_shard_keeps_the_latents_of_all_then_each_brings_up_its_states(monkeypatch, tmp_path):
    names = keys(1, 2, 3)

    def begin():
        be_asked(monkeypatch, names)
        return shards_of_latents(monkeypatch, stored_in(tmp_path / "s"), ranks=(0,))[0]

    first = begin()
    for shard in first:
        shard.linker.arrive("learnt")
        shard.offload(names)
    for shard, num_pages in zip(first, (4, 1), strict=True):
        shard.until(lambda: shard.linker.counters.archived_pages == num_pages)  # noqa: B023
        shard.linker.close()

    second = begin()
    for shard in second:
        shard.linker.arrive("r")
    second[0].until(lambda: all(shard.lookup(names) == [3] for shard in second))
    for shard in second:
        assert shard.load(names) is not None and shard.land()
    for shard in second:
        shard.linker.close()


def test_store_when_the_shards_of_a_rank_have_lost_different_states_then_all_bring_up_one_that_both_have(
    monkeypatch, tmp_path
):
    names = keys(1, 2, 3)

    def begin():
        be_asked(monkeypatch, names)
        return shards_of_latents(monkeypatch, stored_in(tmp_path / "s"), ranks=(0,))[0]

    first = begin()
    for shard, has_last, num_pages in zip(first, (True, False), (5, 1), strict=True):
        shard.linker.arrive("learnt")
        shard.offload(names[:2])
        shard.offload(names[2:], with_state=has_last)
        shard.until(lambda: shard.linker.counters.archived_pages == num_pages)  # noqa: B023
        shard.linker.close()

    second = begin()
    for shard in second:
        shard.linker.arrive("r")
    lengths = [list(shard.linker.cache.lengths(names, 3)) for shard in second]
    for shard in second:
        shard.linker.close()
    assert lengths == [[3, 2], [2]]


def test_namespace_when_states_have_another_type_then_they_are_not_exchanged(monkeypatch):
    rank_table = _native.RankTable.create(NUM_SLOTS)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.0)
    owner = StateRank(monkeypatch, rank_table, 0, config)
    slots = shared_slots(monkeypatch)
    slots.mamba_pool.banyan_states = state_pool.replace(slots.mamba_pool.banyan_states, dtype="torch.int32")
    reader = StateRank(monkeypatch, rank_table, 1, config, slots)
    owner.offload(keys(1, 2))
    assert reader.lookup(keys(1, 2)) == []


def test_state_when_a_model_has_states_then_it_tells_of_them(ranks):
    states = ranks[0].linker.state()["states"]
    assert states["num_pool_pages"] == states["num_free_pages"] == NUM_STATES


def test_planner_when_a_fetch_brings_a_state_then_it_knows_what_that_weighs(ranks):
    tokens = ranks[0].linker._planner._fixed_tokens
    state_bytes = sum(tensor[:, 0].numel() * tensor.element_size() for tensor in tensors_of(ranks[0].slots))
    assert tokens == state_bytes / (len(FULL) * 2 * POOL["head_num"] * POOL["head_dim"] * 2)


@pytest.mark.parametrize("what", ["a draft", "no place for states", "layers that nobody knows", "side states"])
def test_linker_when_states_are_of_a_kind_that_is_not_known_then_it_is_refused(monkeypatch, capsys, what):
    slots = make_slots() if what == "no place for states" else shared_slots(monkeypatch)
    if what == "layers that nobody knows":
        slots.mamba_map = {0: 0, 9: 1}
    if what == "side states":
        slots.ngram_pool = SimpleNamespace(enabled=True)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.0)
    drafts = (object(),) if what == "a draft" else ()
    with pytest.raises(SystemExit):
        StateRank(monkeypatch, _native.RankTable.create(NUM_SLOTS), 0, config, slots, drafts=drafts)
    assert "--banyan-share off" in capsys.readouterr().err
