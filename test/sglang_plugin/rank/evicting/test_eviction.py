# SPDX-License-Identifier: Apache-2.0
"""Victims of SGLang's own tree core, in the walk that SGLang's cache drives."""

from __future__ import annotations

import hashlib
import random
import weakref
from array import array
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import create_tree_core
from sglang.srt.mem_cache.unified_radix_cache import COMPONENT_REGISTRY
from test.sglang_plugin.rank.hooked import hooked

from banyan.core import SourceKind
from banyan.planner.answer_reuse import LEAST_JUDGED, Answers
from banyan.planner.stretches import STRETCHES_PER_POOL
from banyan.sglang_plugin.rank import prefill
from banyan.sglang_plugin.rank.evicting import eviction
from banyan.sglang_plugin.rank.evicting.node_demand import NodeDemand
from banyan.telemetry import Counters, Dropped, NodeReuse

FULL, PAGE = ComponentType.FULL, 16
PROMPT = 8 * PAGE
"""A prompt is as long as what goes at once."""


class Cache:
    """What of SGLang's cache drives a walk, around its tree core."""

    def __init__(self, core="rust"):
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=PAGE,
            tree_components=(FULL,),
        )
        self.page_size, self.tree_components, self.enable_session_radix_cache = PAGE, (FULL,), False
        self.token_to_kv_pool_allocator = SimpleNamespace(has_what_it_needs=False)
        self.tree_core = create_tree_core(core, params, {FULL: COMPONENT_REGISTRY[FULL](self, params)})
        self.tree_core.enable_external_cache_linker = True
        self.num_slots = 0

    def insert(self, tokens):
        """The node at the end of a chain of whole pages."""
        value = torch.arange(self.num_slots, self.num_slots + len(tokens))
        self.num_slots += len(tokens)
        step = self.tree_core.begin_insert(InsertParams(key=RadixKey(array("q", tokens)), value=value))
        while step.result is None:
            step = self.tree_core.resume_insert()
        self.tree_core.end_insert()
        return step.result.last_device_node

    def insert_as_sglang(self, tokens):
        """As its cache does, with what hooks the insertion."""
        key, num_held = RadixKey(array("q", tokens)), self.num_held(tokens)
        node = self.insert(tokens)
        result = InsertResult(prefix_len=num_held, last_device_node=node)
        eviction.after_insert(result, self, InsertParams(key=key))
        return node

    def match_prefix(self, params):
        return self.tree_core.match_prefix(params)

    def num_held(self, tokens):
        return self.tree_core.match_full_device_prefix(RadixKey(array("q", tokens)))[0]

    def evict(self, num_tokens):
        """Tokens that have gone."""
        core, tracker = self.tree_core, {FULL: 0}
        core.evict_device_start(FULL, num_tokens)
        try:
            while True:
                step = core.evict_device_next_node(FULL, tracker)
                if step.node_id is None:
                    return tracker[FULL]
                gone = core.evict_device_leaf(step.node_id, False)
                tracker[FULL] += gone.tracker[FULL]
                gone.device_frees.clear()
                gone.host_frees.clear()
                gone.cache_actions.clear()
        finally:
            core.evict_device_end(FULL)


def prompt(number, num_pages=8):
    return list(range(number * 1_000, number * 1_000 + num_pages * PAGE))


@pytest.fixture(params=["rust", "python"])
def rig(monkeypatch, request):
    monkeypatch.setattr(eviction.runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(eviction, "chosen_policy", lambda: None)
    monkeypatch.setattr(prefill, "_has_begun", None)
    cache, elsewhere = Cache(request.param), set()
    linker = SimpleNamespace(
        is_whole_rank=True,
        cache=SimpleNamespace(
            copies_of=lambda keys: [SourceKind.PEER if key in elsewhere else None for key in keys],
        ),
        move_share=lambda kind: 0.01,
        demand=NodeDemand(None, 1_000, Counters(), NodeReuse(PAGE, 1_000, 0, lambda: 0.0)),
        num_frames=8 * STRETCHES_PER_POOL,
        dropped=Dropped(),
        counters=Counters(),
        kept_in_pool=set(),
        ends_in_pool=set(),
        answers=Answers(),
        writes_back=None,
    )
    eviction.after_init_cache_linker(None, cache, linker)
    return cache, elsewhere, linker


def keys_of(number, num_pages):
    """Of the pages of a prompt that no tree holds."""
    return [hashlib.sha256(f"{number} {page}".encode()).hexdigest() for page in range(num_pages)]


def asked(linker, keys, request):
    return linker.demand.asked(linker.demand.tell(keys), request)


def key_of(cache, node):
    key = cache.tree_core.get_last_hash_value(node)
    assert key is not None
    return key


def test_evict_when_nobody_else_holds_anything_then_the_oldest_goes_as_before(rig):
    cache, _, linker = rig
    for number in range(4):
        cache.insert(prompt(number))
    assert cache.evict(PROMPT) == PROMPT
    assert [cache.num_held(prompt(number)) for number in range(4)] == [0, PROMPT, PROMPT, PROMPT]
    assert (linker.counters.evicted_duplicate_pages, linker.counters.evicted_last_pages) == (0, 8)


def test_evict_when_less_is_wanted_than_goes_at_once_then_that_goes(rig):
    cache, _, _ = rig
    for number in range(12):
        cache.insert(prompt(number, 1))
    assert cache.evict(PAGE) == 8 * PAGE
    assert [cache.num_held(prompt(number, 1)) for number in range(12)] == 8 * [0] + 4 * [PAGE]


def test_evict_when_a_younger_prompt_is_held_elsewhere_then_it_goes_first(rig):
    cache, elsewhere, linker = rig
    nodes = [cache.insert(prompt(number)) for number in range(4)]
    elsewhere.add(key_of(cache, nodes[2]))
    assert cache.evict(2 * PROMPT) == 2 * PROMPT
    assert [cache.num_held(prompt(number)) for number in range(4)] == [0, PROMPT, 0, PROMPT]
    assert (linker.counters.evicted_duplicate_pages, linker.counters.evicted_last_pages) == (8, 8)


def test_evict_when_a_prompt_in_the_queue_asks_for_a_leaf_then_it_stays_until_the_prompt_has_begun(rig):
    cache, _, linker = rig
    nodes = [cache.insert(prompt(number)) for number in range(3)]
    asked(linker, [key_of(cache, nodes[0])], "r")
    cache.evict(PROMPT)
    assert [cache.num_held(prompt(number)) for number in range(3)] == [PROMPT, 0, PROMPT]
    prefill._has_begun("r")
    asked(linker, [key_of(cache, nodes[2])], "another")
    cache.evict(PROMPT)
    assert [cache.num_held(prompt(number)) for number in range(3)] == [0, 0, PROMPT]


def test_evict_when_it_was_learnt_that_the_oldest_comes_next_then_the_youngest_goes(rig):
    cache, _, linker = rig
    for turn in range(1_200):
        asked(linker, keys_of(turn % 100, 20), "r")
    for number in range(3):
        asked(linker, [key_of(cache, cache.insert(prompt(number))), *keys_of(100 + number, 50)], "r")
    linker.demand.served("r")
    assert linker.demand.state()["age_power"] > 0.0
    cache.evict(PROMPT)
    assert [cache.num_held(prompt(number)) for number in range(3)] == [PROMPT, PROMPT, 0]


def leave_out(answers):
    """Let prompts leave answers out, until that is learnt."""
    for number in range(LEAST_JUDGED):
        answers.given(None, f"end {number}", ["thought"])
        answers.asked(None, [f"end {number}", "something else"])


def test_evict_when_prompts_leave_answers_out_then_an_answer_goes_and_no_prompt_with_it(rig):
    cache, _, linker = rig
    leave_out(linker.answers)
    nodes = [cache.insert(prompt(number)) for number in range(4)]
    with_prompt, alone = (cache.tree_core.get_hash_values(node) for node in nodes[1:3])
    linker.answers.given(None, with_prompt[1], with_prompt[2:])
    linker.answers.given(None, "a prompt's end", alone)
    assert cache.evict(PROMPT) == PROMPT
    assert [cache.num_held(prompt(number)) for number in range(4)] == [PROMPT, PROMPT, 0, PROMPT]


def test_evict_when_a_request_waits_for_an_answer_then_it_stays_though_prompts_leave_answers_out(rig):
    cache, _, linker = rig
    leave_out(linker.answers)
    nodes = [cache.insert(prompt(number)) for number in range(3)]
    linker.answers.given(None, "a prompt's end", cache.tree_core.get_hash_values(nodes[1]))
    asked(linker, [key_of(cache, nodes[1])], "r")
    cache.evict(PROMPT)
    assert [cache.num_held(prompt(number)) for number in range(3)] == [0, PROMPT, PROMPT]


def test_evict_when_a_request_uses_a_duplicate_then_it_stays(rig):
    cache, elsewhere, _ = rig
    nodes = [cache.insert(prompt(number)) for number in range(3)]
    elsewhere.update(key_of(cache, node) for node in nodes)
    cache.tree_core.inc_lock_ref(nodes[1])
    cache.evict(100 * PAGE)
    assert [cache.num_held(prompt(number)) for number in range(3)] == [0, PROMPT, 0]


def test_evict_when_children_have_gone_then_the_walk_goes_on_with_their_parent(rig):
    cache, elsewhere, _ = rig
    stem = prompt(0)
    leaves = [cache.insert([*stem, *prompt(number)]) for number in range(1, 4)]
    elsewhere.add(key_of(cache, leaves[2]))
    assert cache.evict(100 * PAGE) == 4 * PROMPT
    assert cache.tree_core.full_evictable_size() == 0


@pytest.fixture
def full(rig):
    """Pages have had to go; three prompts of 40 pages are in the tree, asked for in this order."""
    cache, _, linker = rig
    cache.insert(prompt(9, 1))
    cache.evict(PAGE)
    for number in range(3):
        nodes = cache.insert_as_sglang(prompt(number, 40))
        asked(linker, [cache.tree_core.get_last_hash_value(nodes)], f"r{number}")
        linker.demand.served(f"r{number}")
    return cache


def held_pages(cache):
    return [cache.num_held(prompt(number, 40)) // PAGE for number in range(3)]


def test_evict_when_long_prompts_were_split_then_the_oldest_loses_its_tail_and_no_more_than_a_stretch_too_much(full):
    assert full.evict(10 * PAGE) == 16 * PAGE
    assert held_pages(full) == [24, 40, 40]


def test_evict_when_a_stretch_has_gone_then_the_one_before_it_goes_before_any_of_a_younger_prompt(full):
    assert full.evict(41 * PAGE) == 48 * PAGE
    assert held_pages(full) == [0, 32, 40]


def test_insert_when_nothing_has_had_to_go_then_a_prompt_stays_in_one_piece(rig):
    cache, _, _ = rig
    cache.insert_as_sglang(prompt(0, 40))
    assert cache.evict(PAGE) == 40 * PAGE


def test_insert_when_a_request_uses_the_prompt_then_all_its_stretches_stay(full):
    node = full.insert_as_sglang(prompt(3, 40))
    full.tree_core.inc_lock_ref(node)
    full.evict(1_000 * PAGE)
    assert held_pages(full) == [0, 0, 0] and full.num_held(prompt(3, 40)) == 40 * PAGE
    full.tree_core.sanity_check([], [])


@pytest.mark.parametrize(
    "is_whole_rank, given, said",
    [
        (False, {}, "evicts by age"),
        (True, {"radix_eviction_policy": "priority"}, "--radix-eviction-policy priority"),
        (True, {"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
    ],
)
def test_install_when_victims_are_not_banyans_to_choose_then_sglang_evicts_alone_and_a_line_says_why(
    monkeypatch, caplog, is_whole_rank, given, said
):
    monkeypatch.setattr(eviction.runtime, "is_sharing", lambda: True)
    args = SimpleNamespace(**{"radix_eviction_policy": "lru", "enable_session_radix_cache": False, **given})
    monkeypatch.setattr(eviction, "get_server_args", lambda: args)
    cache = Cache()
    before = cache.tree_core.evict_device_next_node
    with caplog.at_level("INFO", "banyan"):
        eviction.after_init_cache_linker(None, cache, SimpleNamespace(is_whole_rank=is_whole_rank))
    assert cache.tree_core.evict_device_next_node == before and said in caplog.text


def test_evict_when_the_allocation_has_what_it_needs_then_nothing_that_is_kept_goes_for_more(rig):
    cache, _, linker = rig
    gone, kept = cache.insert(prompt(1)), cache.insert(prompt(2))
    linker.kept_in_pool.add(cache.tree_core.get_last_hash_value(kept))
    cache.token_to_kv_pool_allocator.has_what_it_needs = True
    assert cache.evict(16 * PAGE) == 8 * PAGE and gone != kept
    assert cache.num_held(prompt(2)) == 8 * PAGE
    cache.token_to_kv_pool_allocator.has_what_it_needs = False
    assert cache.evict(8 * PAGE) == 8 * PAGE


def test_evict_when_a_fetch_asks_for_little_then_nothing_that_is_kept_goes_for_what_goes_with_it(rig):
    cache, _, linker = rig
    cache.insert(prompt(1))
    linker.kept_in_pool.add(cache.tree_core.get_last_hash_value(cache.insert(prompt(2))))
    cache.banyan_victims._least_tokens = 64 * PAGE
    assert cache.evict(PAGE) == 8 * PAGE and cache.num_held(prompt(2)) == 8 * PAGE
    assert cache.evict(PAGE) == 8 * PAGE, "where nothing else can leave"


@pytest.mark.parametrize("part", ["_least_tokens", "_shares", "_look", "_count"])
def test_evict_when_banyans_choice_fails_then_sglang_chooses_and_as_much_goes(rig, monkeypatch, part):
    cache, _, _ = rig
    for number in range(4):
        cache.insert(prompt(number))

    def fails(*args):
        raise ValueError("ours")

    monkeypatch.setattr(cache.banyan_victims, part, fails)
    assert cache.evict(PROMPT) == PROMPT == cache.evict(PROMPT)
    assert [cache.num_held(prompt(number)) for number in range(4)] == [0, 0, PROMPT, PROMPT]
    cache.tree_core.sanity_check([], [])


@pytest.mark.parametrize("seed", range(4))
def test_tree_when_used_at_random_then_it_stays_whole_and_what_is_used_stays(rig, seed):
    cache, elsewhere, linker = rig
    rng, locked = random.Random(seed), {}
    for _ in range(25_000):
        tokens = [*prompt(rng.randrange(3), 2), *prompt(rng.randrange(3, 40), rng.choice([1, 2, 3, 3, 40]))]
        match rng.randrange(4):
            case 0 | 1:
                node = cache.insert_as_sglang(tokens)
                if rng.random() < 0.5:
                    elsewhere.add(key_of(cache, node))
                if rng.random() < 0.2:
                    locked.setdefault(tuple(tokens), []).append((node, cache.tree_core.inc_lock_ref(node)))
            case 2 if locked:
                tokens, taken = locked.popitem()
                for node, receipt in taken:
                    cache.tree_core.dec_lock_ref(node, receipt.to_dec_params())
            case _:
                wanted = rng.randrange(1, 20) * PAGE
                evictable = cache.tree_core.full_evictable_size()
                assert cache.evict(wanted) >= min(wanted, evictable), "nothing that could go is kept"
        assert all(cache.num_held(tokens) == len(tokens) for tokens in locked)
    counters = linker.counters
    assert counters.evicted_duplicate_pages > 0 and counters.evicted_last_pages > 0
    cache.tree_core.sanity_check([], [])


def test_fetch_when_room_is_made_for_it_then_what_it_pushes_out_is_counted(rig):
    cache, _, linker = rig
    for number in range(4):
        cache.insert(prompt(number))
    cache.evict(PROMPT)
    wrapper = SimpleNamespace(cache_linker=linker, hit_markers={"a": SimpleNamespace(tail_hashes=[])})
    load_back = hooked(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.load_back",
        lambda self, req: cache.evict(2 * PROMPT),
    )
    assert load_back(wrapper, SimpleNamespace(rid="a")) == 2 * PROMPT
    cache.evict(PROMPT)
    assert linker.counters.displaced_pages == 16
    assert linker.counters.num_evicted_pages == 32


def page_keys(cache, node):
    core = cache.tree_core
    return [*core.get_prefix_hash_values(node), *core.get_hash_values(node)]


def keep(linker, keys):
    linker.kept_in_pool.update(keys)
    linker.ends_in_pool.add(keys[-1])


def test_evict_when_a_prefix_is_kept_then_it_outlives_ten_times_the_pool_and_goes_once_it_is_not(rig):
    cache, _, linker = rig
    node = cache.insert_as_sglang(prompt(0))
    linker.kept_in_pool.update(page_keys(cache, node))
    for number in range(1, 11):
        cache.insert_as_sglang(prompt(number))
        assert cache.evict(PROMPT) == PROMPT
        assert cache.num_held(prompt(0)) == PROMPT
    linker.kept_in_pool.clear()
    cache.insert_as_sglang(prompt(11))
    cache.evict(PROMPT)
    assert cache.num_held(prompt(0)) == 0


def test_evict_when_more_leaves_are_kept_than_a_walk_looks_at_then_another_one_goes(rig):
    cache, _, linker = rig
    for number in range(100):
        linker.kept_in_pool.update(page_keys(cache, cache.insert_as_sglang(prompt(number))))
    cache.insert_as_sglang(prompt(100))
    assert cache.evict(PROMPT) == PROMPT
    assert cache.num_held(prompt(100)) == 0


@pytest.mark.parametrize("num_kept", [3, eviction.MOST_SPARED_AGAIN + 1])
def test_evict_when_many_leaves_are_kept_then_a_walk_does_not_pass_them_again_for_each_stretch(full, rig, num_kept):
    _, _, linker = rig
    core = full.tree_core
    for number in range(num_kept):
        linker.kept_in_pool.add(core.get_last_hash_value(full.insert(prompt(10 + number, 1))))
    # They are the oldest now.
    for number in range(3):
        core.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt(number, 40)))))
    victims = full.banyan_victims
    passed, theirs = [], victims._start
    victims._start = lambda *args: passed.append(args) or theirs(*args)
    assert full.evict(32 * PAGE) == 32 * PAGE
    assert len(passed) == (4 if num_kept == 3 else 2)
    assert all(full.num_held(prompt(10 + number, 1)) == PAGE for number in range(num_kept))


def test_evict_when_all_is_kept_then_it_goes_all_the_same_and_the_walk_ends(rig):
    cache, _, linker = rig
    for number in range(1, 4):
        linker.kept_in_pool.update(page_keys(cache, cache.insert_as_sglang([*prompt(0), *prompt(number)])))
    assert cache.evict(100 * PAGE) == 4 * PROMPT
    assert cache.tree_core.full_evictable_size() == 0


def test_insert_when_the_beginning_of_a_prompt_is_kept_then_the_rest_of_it_goes_alone(rig):
    cache, _, linker = rig
    keys = page_keys(cache, cache.insert(prompt(0, 16)))
    cache.evict(100 * PAGE)
    keep(linker, keys[:4])
    cache.insert_as_sglang(prompt(0, 16))
    assert cache.evict(12 * PAGE) == 12 * PAGE
    assert cache.num_held(prompt(0, 16)) == 4 * PAGE


def test_insert_when_more_is_kept_for_less_time_behind_a_beginning_that_is_kept_then_that_stays_longer(rig):
    cache, _, linker = rig
    keys = page_keys(cache, cache.insert(prompt(0, 16)))
    cache.evict(100 * PAGE)
    keep(linker, keys[:4])
    keep(linker, keys[:14])
    cache.insert_as_sglang(prompt(0, 16))
    linker.kept_in_pool.difference_update(keys[4:])
    linker.ends_in_pool.remove(keys[13])
    assert cache.evict(12 * PAGE) == 12 * PAGE
    assert cache.num_held(prompt(0, 16)) == 4 * PAGE


class WritesBack:
    """Notes what it is told."""

    def __init__(self, stays=True, has_room=True):
        self.told, self.stays, self.has_room = [], stays, has_room

    def begin(self):
        self.told.append("begin")

    def end(self):
        self.told.append("end")

    def send(self):
        self.told.append("send")

    def leaving(self, keys):
        if self.stays is None:
            raise OSError("no more of them")
        self.told.append(keys)
        return self.stays

    @contextmanager
    def sparing(self, keys):
        self.told.append(f"spares {keys}")
        yield
        self.told.append("spares no more")


@pytest.mark.parametrize("stays", [True, False])
def test_evict_when_a_last_copy_goes_then_the_arena_is_told_before_and_what_stays_there_is_no_last_copy(rig, stays):
    cache, elsewhere, linker = rig
    linker.writes_back = WritesBack(stays)
    last, other = cache.insert(prompt(1)), cache.insert(prompt(2))
    elsewhere.add(key_of(cache, other))
    keys = page_keys(cache, last)
    assert cache.evict(16 * PAGE) == 16 * PAGE
    assert linker.writes_back.told == ["begin", keys, "send"]
    assert linker.counters.evicted_duplicate_pages == (16 if stays else 8)
    assert linker.counters.evicted_last_pages == (0 if stays else 8)


def test_evict_when_it_is_over_then_nothing_of_the_tier_is_held(rig):
    """New weights have another tier, in the old one's place."""
    cache, _, linker = rig
    linker.writes_back = WritesBack()
    cache.insert(prompt(1))
    cache.evict(8 * PAGE)
    tier = weakref.ref(linker.writes_back)
    linker.writes_back = None
    assert tier() is None


def test_evict_when_a_peer_has_the_leaf_then_it_is_not_taken_down(rig):
    cache, elsewhere, linker = rig
    linker.writes_back = WritesBack()
    elsewhere.add(key_of(cache, cache.insert(prompt(1))))
    cache.evict(8 * PAGE)
    assert linker.writes_back.told == ["begin", "send"]


def test_evict_when_a_peer_drops_the_leaf_after_it_was_looked_at_then_it_is_taken_down(rig, monkeypatch):
    cache, elsewhere, linker = rig
    linker.writes_back = WritesBack()
    last, other = cache.insert(prompt(1)), cache.insert(prompt(2))
    elsewhere.add(key_of(cache, other))
    told = [page_keys(cache, node) for node in (last, other)]

    def dropped(keys):
        elsewhere.clear()
        return WritesBack.leaving(linker.writes_back, keys)

    monkeypatch.setattr(linker.writes_back, "leaving", dropped)
    cache.evict(16 * PAGE)
    assert linker.writes_back.told == ["begin", *told, "send"]


@pytest.mark.parametrize("has_room", [True, False])
def test_evict_when_the_arena_had_no_frames_then_a_duplicate_goes_before_a_last_copy(rig, has_room):
    cache, elsewhere, linker = rig
    linker.writes_back = WritesBack(has_room=has_room)
    last, other = cache.insert(prompt(1)), cache.insert(prompt(2))
    elsewhere.add(key_of(cache, other))
    keys = page_keys(cache, last)
    cache.evict(8 * PAGE)
    assert (keys in linker.writes_back.told) == has_room, "the older one"


def test_evict_when_a_kept_leaf_has_to_go_then_the_arena_is_told_as_well(rig):
    cache, _, linker = rig
    linker.writes_back = WritesBack()
    node = cache.insert(prompt(1))
    keys = page_keys(cache, node)
    linker.kept_in_pool.add(keys[-1])
    assert cache.evict(8 * PAGE) == 8 * PAGE
    assert linker.writes_back.told == ["begin", keys, "send"]


def test_evict_when_the_arena_cannot_be_told_then_sglang_chooses_and_pages_go_down_as_they_come(rig):
    cache, _, linker = rig
    linker.writes_back = WritesBack(stays=None)
    cache.insert(prompt(1))
    assert cache.evict(8 * PAGE) == 8 * PAGE
    assert linker.writes_back.told == ["begin", "end"]
    cache.insert(prompt(2))
    assert cache.evict(8 * PAGE) == 8 * PAGE
    assert linker.writes_back.told == ["begin", "end"]


def test_fetch_when_room_is_made_for_it_then_none_is_taken_from_where_its_pages_lie(rig):
    cache, _, linker = rig
    linker.writes_back = WritesBack()
    cache.insert(prompt(1))
    wrapper = SimpleNamespace(cache_linker=linker, hit_markers={"a": SimpleNamespace(tail_hashes=["k"])})
    load_back = hooked(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.load_back",
        lambda self, req: cache.evict(PAGE),
    )
    load_back(wrapper, SimpleNamespace(rid="a"))
    told = linker.writes_back.told
    assert told[:2] == ["spares ['k']", "begin"] and told[-2:] == ["send", "spares no more"]
    load_back(wrapper, SimpleNamespace(rid="b"))
    assert told[-2:] == ["begin", "send"], "it fetches nothing"


def test_allocator_when_victims_are_chosen_then_it_knows_what_is_on_its_way_down(rig):
    cache, _, linker = rig
    allocator = cache.token_to_kv_pool_allocator
    assert not allocator.is_copying_down()
    linker.writes_back = SimpleNamespace(is_copying=True)
    assert allocator.is_copying_down()
