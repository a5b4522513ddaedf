# SPDX-License-Identifier: Apache-2.0
"""The compute quota in SGLang's own adder: its budgets, its cuts, its verdicts. Cache and requests are fakes."""

import gc
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from banyan.config import Config
from banyan.planner import PrefillCost, PrefillTimes
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import learned_times, prefill

PAGE = 16
CHUNK = 4096
COST = PrefillCost(fixed_us=1000.0, token_us=100.0, pair_us=0.0, context_us=0.0)


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
        needs_host_load_back=lambda: False,
        kv=SimpleNamespace(holds_mamba=True, req_pool_idx=None),
    )


@pytest.fixture
def make_adder(monkeypatch):
    """Makes an adder as SGLang does, for a quota in milliseconds or None."""

    def make(quota_ms, *, chunk=CHUNK):
        config = Config(prefill_quota_ms=quota_ms, profile="p") if quota_ms else Config()
        monkeypatch.setattr(runtime, "config", lambda: config)
        times = PrefillTimes(COST)
        monkeypatch.setattr(learned_times, "times", lambda: times)
        monkeypatch.setattr(prefill, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
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
        adder_class = prefill.after_get_prefill_adder_class(PrefillAdder, None)
        assert issubclass(adder_class, PrefillAdder)
        return adder_class(PAGE, FakeTree(), allocator, None, 0.5, 16_384, chunk)

    return make


def add(adder, *requests):
    """SGLang's loop over the waiting queue."""
    for req in requests:
        if adder.budget_state() == AddReqResult.OTHER:
            break
        if adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None) != AddReqResult.CONTINUE:
            break
    return prefill.pieces_of_this_pass()


def test_add_when_there_is_no_quota_then_the_adder_is_stocks_and_the_pieces_are_told(make_adder):
    assert add(make_adder(None), request(1000), request(500, prefix_tokens=160)) == ((1000, 0), (340, 160))


def test_add_when_requests_fit_the_quota_then_the_chunk_budget_is_charged_as_by_stock(make_adder):
    stock, ours = make_adder(None), make_adder(1000.0)
    for adder in (stock, ours):
        add(adder, request(1000), request(333))
    assert ours.rem_chunk_tokens == stock.rem_chunk_tokens
    assert ours.rem_input_tokens == stock.rem_input_tokens


def test_add_when_a_request_exceeds_the_quota_then_sglang_cuts_it_and_nobody_follows(make_adder):
    adder = make_adder(100.0)
    long = request(3000)
    pieces = add(adder, request(200), long, request(10))
    assert pieces == ((200, 0), (784, 0))
    assert COST.time_us(pieces) <= 100_000
    assert adder.new_chunked_req is long
    assert adder.budget_state() == AddReqResult.OTHER


def test_add_when_a_cut_request_goes_on_then_its_next_chunk_obeys_the_quota_and_ends(make_adder):
    long, sizes = request(2500), []
    while True:
        adder = make_adder(100.0)
        if long.extend_end == 0:
            add(adder, long)
            rest = adder.new_chunked_req
        else:
            rest = adder.add_chunked_req(long)
        sizes.append(long.extend_end - long.prefix_len)
        long.prefix_len = long.extend_end
        if rest is None:
            break
    assert sum(sizes) == 2500
    assert all(COST.time_us([(size, 0)]) <= 100_000 for size in sizes)
    assert len(sizes) == 3


def test_add_when_a_cut_request_ends_in_this_pass_then_others_fill_the_rest_of_the_quota(make_adder):
    adder = make_adder(100.0)
    last = request(2500, prefix_tokens=2400)
    assert adder.add_chunked_req(last) is None
    assert add(adder, request(3000)) == ((100, 2400), (880, 0))


def test_add_when_sglangs_own_chunk_is_smaller_then_it_rules(make_adder):
    adder = make_adder(1000.0, chunk=512)
    assert add(adder, request(3000), request(10)) == ((512, 0),)


def test_add_when_memory_is_short_then_the_verdict_is_stocks(make_adder):
    adder = make_adder(1e6, chunk=100_000)
    verdict = adder.add_one_req(request(30_000), has_chunked_req=False, truncation_align_size=None)
    assert verdict == AddReqResult.NO_TOKEN
    assert prefill.pieces_of_this_pass() == ()
    assert adder.rem_chunk_tokens == 100_000


def test_adder_when_prefills_are_never_cut_then_the_quota_is_given_up_aloud(make_adder, caplog):
    prefill._warn_no_chunks.cache_clear()
    adder = make_adder(1.0, chunk=None)
    assert "no effect" in caplog.text
    assert add(adder, request(3000)) == ((3000, 0),)


def test_adder_when_banyan_is_off_then_sglangs_own_class(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert prefill.after_get_prefill_adder_class(PrefillAdder, None) is None


def test_pieces_when_the_pass_is_over_then_none(make_adder):
    assert add(make_adder(None), request(100)) == ((100, 0),)
    gc.collect()
    assert prefill.pieces_of_this_pass() == ()


@pytest.fixture
def lockstep(monkeypatch):
    """A rank that steps with others: 100 moved tokens a step, and as many in quarantine as ``lockstep`` says."""
    held = SimpleNamespace(num_tokens=0, most_moved=100)
    monkeypatch.setattr(prefill, "_lockstep", None)
    prefill.step_together(most_moved_tokens=lambda: held.most_moved, num_quarantined_tokens=lambda: held.num_tokens)
    return held


def moving(num_tokens, moved_tokens):
    """A request whose first tokens come from elsewhere."""
    req = request(num_tokens)
    req.host_hit_length = moved_tokens
    req.best_match_node = None
    req.needs_host_load_back = lambda: True
    return req


def test_add_when_ranks_step_together_then_the_second_large_move_waits_for_the_next_step(make_adder, lockstep):
    first, second, plain = moving(900, 640), moving(500, 320), request(50)
    adder = make_adder(None)
    assert len(add(adder, first, second, plain)) == 1
    assert adder.add_one_req(second, has_chunked_req=False, truncation_align_size=None) == AddReqResult.OTHER
    assert len(add(make_adder(None), second, plain)) == 2, "the next step takes it, and who moves nothing joins"


def test_add_when_moves_have_become_quicker_then_the_next_step_takes_more_of_them(make_adder, lockstep):
    first, second = moving(900, 640), moving(500, 320)
    assert len(add(make_adder(None), first, second)) == 1
    lockstep.most_moved = 2_000
    assert len(add(make_adder(None), moving(900, 640), second)) == 2


def test_add_when_ranks_step_together_then_pages_in_quarantine_are_not_counted_on(make_adder, lockstep):
    free = make_adder(None).rem_total_tokens
    lockstep.num_tokens = 19_000
    adder = make_adder(None)
    assert adder.rem_total_tokens == free - 19_000
    assert adder.add_one_req(request(2_000), has_chunked_req=False, truncation_align_size=None) == AddReqResult.NO_TOKEN


def test_add_when_other_nodes_may_still_answer_for_a_request_then_it_is_passed_over_and_others_go_on(
    make_adder, monkeypatch
):
    awaited, ready = request(100), request(200)
    monkeypatch.setattr(prefill, "_is_awaited", lambda rid: rid == awaited.rid)
    adder = make_adder(None)
    add(adder, awaited, ready)
    assert adder.can_run_list == [ready]


def test_add_when_a_request_leaves_the_queue_then_that_is_told_and_of_one_that_stays_it_is_not(make_adder, monkeypatch):
    begun = []
    monkeypatch.setattr(prefill, "_has_begun", None)
    prefill.tell_begun(begun.append)
    adder = make_adder(None)
    add(adder, request(100), request(5_000), request(200))
    assert begun == ["r100", "r5000"] == [req.rid for req in adder.can_run_list]
