# SPDX-License-Identifier: Apache-2.0
"""Which pages a prefill server's next forward completes, as its senders are told."""

from types import SimpleNamespace

import pytest
import torch
from test.sglang_plugin.features.pairs.hand_over_rig import NUM_LAYERS, DecodeSide, SlowAgent, make_manager

from banyan.features.pairs.advance import Forwards
from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.rank import advances, at_rank
from banyan.sglang_plugin import runtime

PAGE_TOKENS = 4
ROOM = 5


@pytest.fixture
def rank(monkeypatch):
    """A rank whose requests have token t in slot ``100 + t``, that is page p of the prompt in page 25 + p."""
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: False)
    manager = make_manager(SlowAgent(1))
    manager.rooms.claim(ROOM)
    DecodeSide(manager, manager.agent).asks(ROOM, 20)
    of_layers = SimpleNamespace(num_layers=NUM_LAYERS)
    installed = SimpleNamespace(forwards=Forwards(), rank=of_layers)
    monkeypatch.setattr(at_rank, "installed", lambda: installed)
    allocator = SimpleNamespace(page_size=PAGE_TOKENS, translate_kv_indices_for_transfer=lambda slots: slots)
    slots = SimpleNamespace(req_to_token=torch.arange(100, 200).unsqueeze(0))
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator, req_to_token_pool=slots)
    return SimpleNamespace(manager=manager, installed=installed, scheduler=scheduler)


def request(rank, *, num_tokens=30, extend_end=30, held_by_decode=0, start=None, is_waiting=False):
    return SimpleNamespace(
        disagg_kv_sender=SimpleNamespace(kv_mgr=rank.manager, bootstrap_room=ROOM, advanced_tokens=0),
        pending_bootstrap=is_waiting,
        origin_input_ids=[0] * num_tokens,
        extend_end=extend_end,
        disagg_decode_prefix_len=held_by_decode,
        start_send_idx=held_by_decode if start is None else start,
        kv=SimpleNamespace(req_pool_idx=0),
    )


def announced(rank, *requests):
    """``(first place, pages)`` of each advance that the next forward has."""
    plan = SimpleNamespace(batch_to_run=SimpleNamespace(reqs=list(requests)))
    before = len(rank.manager._advances.get(ROOM, ()))
    advances.after_get_next_disagg_prefill_batch_to_run(plan, rank.scheduler)
    return [(ahead.first, ahead.pages.tolist()) for ahead in rank.manager._advances.get(ROOM, ())[before:]]


def test_pages_when_the_prompt_ends_in_this_forward_then_its_last_page_is_among_them(rank):
    assert announced(rank, request(rank)) == [(0, list(range(25, 33)))]


def test_pages_when_the_prompt_goes_on_then_they_are_full_ones_and_the_next_forward_has_the_others(rank):
    asked = request(rank, extend_end=15)
    assert announced(rank, asked) == [(0, [25, 26, 27])]
    # Under overlap SGLang sends the chunk only after the next forward has been chosen.
    asked.extend_end = 30
    assert announced(rank, asked) == [(3, [28, 29, 30, 31, 32])]


def test_pages_when_the_decode_server_has_the_beginning_then_places_count_from_there(rank):
    assert announced(rank, request(rank, held_by_decode=8)) == [(0, list(range(27, 33)))]
    assert announced(rank, request(rank, held_by_decode=8, start=16)) == [(2, list(range(29, 33)))]


def test_pages_when_there_are_none_then_nothing_begins(rank):
    assert announced(rank, request(rank, extend_end=3)) == []
    assert announced(rank, request(rank, is_waiting=True)) == []
    other = request(rank)
    # As SGLang's health checks have it.
    other.disagg_kv_sender = SimpleNamespace(kv_mgr=rank.manager, bootstrap_room=ROOM)
    assert announced(rank, other) == []


def test_batch_when_there_is_none_or_layers_may_be_incomplete_then_nothing_begins(rank, monkeypatch):
    advances.after_get_next_disagg_prefill_batch_to_run(SimpleNamespace(batch_to_run=None), rank.scheduler)
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: True)
    assert announced(rank, request(rank)) == []


def test_layers_when_the_forward_completes_them_then_its_senders_queue_has_a_layer_batch(rank):
    announced(rank, request(rank))
    rank.installed.forwards.begin()
    rank.installed.forwards.completed(1)
    assert rank.manager.transfer_queues[0].get().prefill_kv_indices.tolist() == list(range(25, 33))


def test_loop_when_there_is_no_batch_then_a_cpus_scheduler_pauses_and_with_one_it_does_not(rank, monkeypatch):
    paused_s = []
    monkeypatch.setattr(advances, "_pauses", Pauses(paused_s.append))
    announced(rank, request(rank))
    assert paused_s == []
    nothing = SimpleNamespace(batch_to_run=None)
    advances.after_get_next_disagg_prefill_batch_to_run(nothing, rank.scheduler)
    assert len(paused_s) == 1
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: True)
    advances.after_get_next_disagg_prefill_batch_to_run(nothing, rank.scheduler)
    assert len(paused_s) == 1
