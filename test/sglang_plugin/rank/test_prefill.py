# SPDX-License-Identifier: Apache-2.0
"""Banyan's part in SGLang's own adder. Cache and requests are fakes."""

import gc
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import pending, prefill

PAGE = 16
CHUNK = 4096
SCHEDULER = SimpleNamespace(enable_priority_preemption=False)


class FakeTree:
    """A cache that holds nothing and evicts nothing."""

    buffer_pipeline = None
    disable = False

    def __getattr__(self, name):
        return lambda *args, **kwargs: 0

    def init_load_back(self, params):
        return params.host_hit_length, None

    def lock(self, node):
        return SimpleNamespace(node=node)

    def unlock(self, lock):
        pass


class FakeReq(SimpleNamespace):
    @property
    def extend_len(self):
        return self.extend_end - self.prefix_len


def request(num_tokens, *, prefix_tokens=0):
    return FakeReq(
        rid=f"r{num_tokens}",
        full_untruncated_fill_ids=list(range(num_tokens)),
        prefix_len=prefix_tokens,
        extend_end=prefix_tokens,
        host_hit_length=0,
        swa_host_hit_length=0,
        auxiliary_swa_host_hit_length=0,
        mamba_host_hit_length=0,
        host_loaded_length=0,
        storage_hit_length=0,
        storage_hit_start=0,
        host_hit_is_storage=False,
        cache_request_handle=None,
        materialized_host_hit_len=lambda: 0,
        fulfilled_storage_hit_len=lambda prefix_len: 0,
        last_node=None,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=4, ignore_eos=False),
        retracted_stain=False,
        positional_embed_overrides=None,
        skip_radix_cache_insert=False,
        session=None,
        extra_key=None,
        cache_salt=None,
        lora_id=None,
        origin_input_ids=array("q", range(num_tokens)),
        finished=lambda: False,
        _compute_max_prefix_len=lambda num_tokens: num_tokens - 1,
        needs_host_load_back=lambda: False,
        kv=SimpleNamespace(holds_mamba=True, req_pool_idx=None),
    )


@pytest.fixture
def make_adder(monkeypatch):
    """Makes an adder as SGLang does."""

    def make():
        monkeypatch.setattr(runtime, "config", Config)
        monkeypatch.setattr(
            schedule_policy,
            "get_exec",
            lambda: SimpleNamespace(features=SimpleNamespace(enable_encoder_swa_bounded_replay=False)),
        )
        monkeypatch.setattr(schedule_policy, "get_schedule", lambda: SimpleNamespace(schedule_policy="fcfs"))
        monkeypatch.setattr(schedule_policy, "mamba_prefill_chunk_grid", lambda: 1)
        allocator = PagedTokenToKVPoolAllocator(
            size=20_000 // PAGE * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=None,
            need_sort=False,
        )
        adder_class = prefill.after_get_prefill_adder_class(PrefillAdder, SCHEDULER)
        assert issubclass(adder_class, PrefillAdder)
        return adder_class(PAGE, FakeTree(), allocator, None, 0.5, 16_384, CHUNK)

    return make


def add(adder, *requests):
    """SGLang's loop over the waiting queue."""
    for req in requests:
        if adder.budget_state() == AddReqResult.OTHER:
            break
        if adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None) != AddReqResult.CONTINUE:
            break
    return prefill.pieces_of_this_pass()


def test_add_when_requests_are_added_then_their_pieces_are_told(make_adder):
    assert add(make_adder(), request(1000), request(500, prefix_tokens=160)) == ((1000, 0), (340, 160))


def test_adder_when_banyan_is_off_then_sglangs_own_class(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert prefill.after_get_prefill_adder_class(PrefillAdder, None) is None


def test_pieces_when_the_pass_is_over_then_none(make_adder):
    assert add(make_adder(), request(100)) == ((100, 0),)
    gc.collect()
    assert prefill.pieces_of_this_pass() == ()


@pytest.fixture
def lockstep(monkeypatch):
    """A rank that steps with others: 100 moved tokens a step, and as many in quarantine as ``lockstep`` says."""
    held = SimpleNamespace(num_tokens=[0], most_moved=100)
    monkeypatch.setattr(prefill, "_most_moved_tokens", None)
    monkeypatch.setattr(prefill, "_num_uncounted_tokens", None)
    prefill.step_together(lambda: held.most_moved)
    prefill.leave_out(lambda: held.num_tokens)
    return held


def moving(num_tokens, moved_tokens, **fields):
    """A request whose first tokens come from elsewhere, and what else is to be so of it."""
    req = waiting(num_tokens, **fields)
    req.host_hit_length = moved_tokens
    req.best_match_node = None
    req.needs_host_load_back = lambda: True
    return req


def test_add_when_ranks_step_together_then_the_second_large_move_waits_for_the_next_step(make_adder, lockstep):
    first, second, plain = moving(900, 640), moving(500, 320), request(50)
    adder = make_adder()
    assert len(add(adder, first, second, plain)) == 1
    assert adder.add_one_req(second, has_chunked_req=False, truncation_align_size=None) == AddReqResult.OTHER
    assert len(add(make_adder(), second, plain)) == 2, "the next step takes it, and who moves nothing joins"


def test_add_when_moves_have_become_quicker_then_the_next_step_takes_more_of_them(make_adder, lockstep):
    first, second = moving(900, 640), moving(500, 320)
    assert len(add(make_adder(), first, second)) == 1
    lockstep.most_moved = 2_000
    assert len(add(make_adder(), moving(900, 640), second)) == 2


def test_add_when_readers_hold_pages_then_these_are_not_counted_on(make_adder, lockstep):
    free = make_adder().rem_total_tokens
    lockstep.num_tokens = [19_000]
    adder = make_adder()
    assert adder.rem_total_tokens == free - 19_000
    assert add(adder, request(2_000)) == ()


@pytest.mark.parametrize(
    ("num_held", "num_tokens", "verdict"),
    [(19_000, 2_000, AddReqResult.OTHER), (100, 25_000, AddReqResult.NO_TOKEN), (0, 25_000, AddReqResult.NO_TOKEN)],
)
def test_add_when_only_pages_in_quarantine_are_lacking_then_the_batch_is_not_taken_for_full(
    make_adder, lockstep, num_held, num_tokens, verdict
):
    """SGLang asks nobody again, of a batch that is full, until one of its requests has ended."""
    lockstep.num_tokens = [num_held]
    req = request(num_tokens)
    assert make_adder().add_one_req(req, has_chunked_req=False, truncation_align_size=None) == verdict


def test_add_when_a_request_takes_the_last_pages_that_nobody_reads_then_the_batch_is_not_taken_for_full(
    make_adder, lockstep
):
    add(adder := make_adder(), request(1_000))
    lockstep.num_tokens = [adder.rem_total_tokens]
    adder, last = make_adder(), request(1_000)
    assert adder.add_one_req(last, has_chunked_req=False, truncation_align_size=None) == AddReqResult.OTHER
    assert adder.can_run_list == [last]


def test_add_when_a_model_has_windows_then_each_pool_is_without_its_own_pages_in_quarantine(make_adder, lockstep):
    lockstep.num_tokens = [0, 300]
    before, after = make_adder(), make_adder()
    assert after.memory_budget.swa_offset == 300 and after.rem_total_tokens == before.rem_total_tokens


def test_adapter_when_its_request_waits_for_an_answer_then_it_takes_no_place_of_another_one(monkeypatch):
    awaited, ready = request(100), request(200)
    monkeypatch.setattr(prefill, "_is_awaited", lambda rid: rid == awaited.rid)
    monkeypatch.setattr(prefill.requests, "id_of", lambda req: req.rid)
    may = [prefill.around_can_schedule_lora_req(lambda *_: True, None, req, set()) for req in (awaited, ready)]
    assert may == [False, True]


def test_add_when_other_nodes_may_still_answer_for_a_request_then_it_is_passed_over_and_others_go_on(
    make_adder, monkeypatch
):
    awaited, ready = request(100), request(200)
    monkeypatch.setattr(prefill, "_is_awaited", lambda rid: rid == awaited.rid)
    adder = make_adder()
    add(adder, awaited, ready)
    assert adder.can_run_list == [ready]


def test_preemption_when_its_request_waits_for_an_answer_then_nobody_is_thrown_out_for_it(make_adder, monkeypatch):
    awaited, ready = request(100), request(200)
    monkeypatch.setattr(prefill, "_is_awaited", lambda rid: rid == awaited.rid)
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda adder, req: True)
    assert [make_adder().preempt_to_schedule(req) for req in (awaited, ready)] == [False, True]


def test_add_when_a_request_leaves_the_queue_then_that_is_told_and_of_one_that_stays_it_is_not(make_adder, monkeypatch):
    begun = []
    monkeypatch.setattr(prefill, "_has_begun", None)
    prefill.tell_begun(begun.append)
    adder = make_adder()
    add(adder, request(100), request(5_000), request(200))
    assert begun == ["r100", "r5000"] == [req.rid for req in adder.can_run_list]


@pytest.fixture
def passed_over(monkeypatch):
    """A rank on which requests wait for what is pending; those that did."""
    told = []
    monkeypatch.setattr(pending, "_pending", None)
    monkeypatch.setattr(pending, "_passed_over", None)
    pending.wait(lambda: told.append(None))
    return told


def waiting(num_tokens, *, prefix_tokens=0, **fields):
    """A request, and what else is to be so of it."""
    req = request(num_tokens, prefix_tokens=prefix_tokens)
    vars(req).update(fields)
    return req


def test_add_when_prompts_begin_alike_then_one_is_computed_and_the_others_wait_once(make_adder, passed_over):
    first, second, other = waiting(1000), waiting(900), waiting(800, cache_salt="another")
    assert add(make_adder(), first, second, other) == ((1000, 0), (800, 0))
    # While the first is computed SGLang makes the next batch.
    assert add(make_adder(), second) == ()
    first.output_ids.append(5)
    second.prefix_len = second.extend_end = 896
    assert add(make_adder(), second) == ((4, 896),)
    assert len(passed_over) == 1


@pytest.fixture
def full_pool(make_adder, passed_over):
    """Makes adders where all but 400 places of the pool hold what could be evicted."""

    def make():
        adder = make_adder()
        adder.token_to_kv_pool_allocator.alloc(19_600)
        adder.tree_cache.full_evictable_size = adder.tree_cache.evictable_size = lambda: 19_600
        return adder

    return make


def test_add_when_prompts_begin_with_what_is_moved_to_a_full_pool_then_it_is_moved_once(full_pool, passed_over):
    first, second = moving(3000, 2992), moving(2900, 2896)
    assert len(add(full_pool(), first, second)) == 1
    first.output_ids.append(5)
    found = waiting(2900, prefix_tokens=2896, banyan_passes=second.banyan_passes)
    assert add(full_pool(), found) == ((4, 2896),) and len(passed_over) == 1


def test_add_when_there_is_room_then_each_moves_its_own(make_adder, passed_over):
    assert len(add(make_adder(), moving(3000, 2992), moving(2900, 2896))) == 2


def test_add_when_little_is_moved_then_each_moves_its_own(full_pool):
    assert len(add(full_pool(), moving(700, 640), moving(750, 640))) == 2


def test_add_when_windows_are_moved_then_each_moves_its_own(full_pool):
    """The one does not leave the window that the other needs."""
    assert len(add(full_pool(), moving(3000, 2992), moving(2900, 2896, swa_host_hit_length=64))) == 2


def test_add_when_it_has_waited_for_a_move_then_it_waits_as_long_for_what_is_computed(full_pool, passed_over):
    """What lay elsewhere is in the pool then: the wait was not in vain."""
    waits, behind = [], moving(4000, 2992)
    for moved, computed in ((2992, 64), (2992, 64), (2992, 1008), (2992, 1008)):
        if len(waits) == 2:
            behind.prefix_len, behind.host_hit_length = 2992, 0
        adder = full_pool()
        add(adder, moving(moved + computed, moved))
        waits.append(
            adder.add_one_req(behind, False, None) == AddReqResult.CONTINUE and behind not in adder.can_run_list
        )
    assert waits == [True] * 4


@pytest.mark.parametrize(
    "fields", [{"skip_radix_cache_insert": True}, {"positional_embed_overrides": [0]}, {"lora_id": "an adapter"}]
)
def test_add_when_the_other_prompt_leaves_nothing_that_can_be_found_then_nobody_waits(make_adder, passed_over, fields):
    assert len(add(make_adder(), waiting(1000, **fields), waiting(900))) == 2
    assert not passed_over


def test_add_when_a_piece_of_a_long_prompt_is_computed_then_those_that_begin_alike_wait(make_adder, passed_over):
    adder = make_adder()
    adder.add_chunked_req(waiting(2 * CHUNK))
    second = waiting(2 * CHUNK)
    assert adder.add_one_req(second, has_chunked_req=True, truncation_align_size=None) == AddReqResult.CONTINUE
    assert len(adder.can_run_list) == 1 and len(passed_over) == 1


def test_adder_when_one_may_be_thrown_out_for_another_then_nobody_waits(make_adder, passed_over, monkeypatch):
    monkeypatch.setattr(SCHEDULER, "enable_priority_preemption", True)
    assert len(add(make_adder(), waiting(1000), waiting(900))) == 2


def test_add_when_the_model_has_states_then_nobody_waits(make_adder, passed_over):
    adder = make_adder()
    adder.is_hybrid_ssm_cache = True
    assert len(add(adder, waiting(1000), waiting(900))) == 2


def test_add_when_it_is_a_turn_of_a_streamed_session_then_neither_it_nor_others_wait(make_adder, passed_over):
    streamed = SimpleNamespace(streaming=True)
    assert len(add(make_adder(), waiting(1000, session=streamed), waiting(900), waiting(950, session=streamed))) == 3


def test_add_when_one_behind_those_that_wait_does_not_fit_then_the_batch_is_not_full(make_adder, passed_over):
    """Full means that nobody is looked at until an answer has ended."""
    adder, too_long = make_adder(), waiting(40_000, cache_salt="another")
    verdicts = [adder.add_one_req(req, False, None) for req in (waiting(1000), waiting(900), too_long)]
    assert verdicts == [AddReqResult.CONTINUE, AddReqResult.CONTINUE, AddReqResult.OTHER]
    assert make_adder().add_one_req(too_long, False, None) == AddReqResult.NO_TOKEN


def test_add_when_places_are_few_then_those_that_wait_keep_theirs(make_adder, passed_over):
    adder = make_adder()
    adder.max_running_requests = 3
    first, *others = waiting(1000), waiting(900), *(waiting(800, cache_salt=f"{number}") for number in range(3))
    add(adder, first, *others)
    assert adder.can_run_list == [first, others[1]]


def test_add_when_very_many_wait_then_the_pass_ends(make_adder, passed_over):
    assert len(add(make_adder(), *(waiting(600 + number) for number in range(100)))) == 1
    assert len(passed_over) == prefill.MOST_PASSED_OVER


def test_add_when_what_is_found_comes_and_goes_then_it_waits_no_longer(make_adder, passed_over):
    lasting, has_waited = waiting(2000), []
    for prefix_tokens in (512, 256, 512, 256):
        adder = make_adder()
        add(adder, waiting(2000))
        lasting.prefix_len = lasting.extend_end = prefix_tokens
        adder.add_one_req(lasting, False, None)
        has_waited.append(lasting not in adder.can_run_list)
    assert has_waited == [True, True, True, False]


def test_add_when_nothing_of_the_prompt_may_come_from_a_cache_then_it_does_not_wait(make_adder, passed_over):
    of_all_logprobs = waiting(900, _compute_max_prefix_len=lambda num_tokens: 0)
    assert len(add(make_adder(), waiting(1000), of_all_logprobs)) == 2


def test_add_when_what_they_wait_for_never_comes_then_they_are_not_computed_one_after_the_other(
    make_adder, passed_over
):
    queue, batches = [waiting(1000 + number) for number in range(6)], []
    while queue:
        adder = make_adder()
        add(adder, *queue)
        batches.append(len(adder.can_run_list))
        for req in adder.can_run_list:
            req.output_ids.append(5)
            queue.remove(req)
    assert batches == [1, 1, 1, 3] and len(passed_over) == 5
