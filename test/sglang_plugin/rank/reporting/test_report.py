# SPDX-License-Identifier: Apache-2.0
"""Cached tokens as clients see them: no source is lost on the way into an OpenAI answer."""

from types import SimpleNamespace

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from banyan.config import Config
from banyan.sglang_plugin.rank.reporting import report
from banyan.telemetry import Counters, Parting, Why

SOURCES = {"device": 16, "host": 32, "peer": 64, "storage": 128}


@pytest.fixture(scope="module")
def answers():
    """The modules that build OpenAI answers; each has imported the hooked function by name."""
    load_plugins()
    from sglang.srt.entrypoints.openai import serving_chat, serving_completions, utils

    return serving_chat, serving_completions, utils


def test_openai_breakdown_when_a_peer_held_tokens_then_they_count_as_host(answers):
    for module in answers:
        details = module.cached_tokens_details_from_dict(SOURCES)
        assert details.model_dump() == {"device": 16, "host": 96, "storage": 128}


def test_openai_breakdown_when_the_server_is_stock_then_nothing_is_added(answers):
    for module in answers:
        assert module.cached_tokens_details_from_dict({"device": 16, "host": 32}).model_dump() == {
            "device": 16,
            "host": 32,
        }


def told(details, req):
    """What an answer says where SGLang has booked ``details``."""
    req.sampling_params = getattr(req, "sampling_params", SamplingParams())
    req.discard_output_reason = getattr(req, "discard_output_reason", None)
    req.cached_tokens_device, req.cached_tokens_host = (
        (0, 0) if details is None else (details["device"], details["host"])
    )
    req.cached_tokens, req.cached_tokens_storage = req.cached_tokens_device + req.cached_tokens_host, 0
    known = report.told_details(None, req)
    if known is not None:
        return known[0]
    return report.around_get_cached_tokens_details(lambda streamer, req: details, None, req)


def sent(**fields):
    """A request of which SGLang has booked 16 tokens as its own and 64 as loaded."""
    return told({"device": 16, "host": 64}, SimpleNamespace(**fields))


def rank_that_counts():
    return SimpleNamespace(counters=Counters(), computed=lambda req, cached_tokens: {})


@pytest.fixture
def sharing(monkeypatch):
    monkeypatch.setattr(report.runtime, "config", lambda: Config())


def test_details_when_a_rank_has_looked_then_they_say_what_it_saw_and_who_held_it(sharing):
    span = {"dp_origin_kv_len": 16, "dp_max_kv_len": 96, "dp_max_kv_rank": 3}
    assert sent(banyan_tokens={"peer": 64}, **span) == {"device": 16, "peer": 64, "host": 0, "storage": 0, **span}


def test_details_when_a_prompt_has_parted_from_its_sessions_last_then_they_say_where_whatever_was_cached(
    sharing,
):
    nothing = SimpleNamespace(dp_origin_kv_len=0, dp_max_kv_len=0, dp_max_kv_rank=-1, banyan_parting=Parting(16, 3))
    details = told(None, nothing)
    assert (details["parted_at"], details["parted_prompts"]) == (16, 3)
    assert "parted_at" not in sent(banyan_tokens={})


def test_details_when_another_node_supplied_tokens_then_they_are_named_and_count_as_host_in_openai_answers(
    sharing, answers
):
    details = sent(banyan_tokens={"peer": 16, "remote": 32}, dp_origin_kv_len=16, dp_max_kv_len=96, dp_max_kv_rank=0)
    tiers = {tier: details[tier] for tier in ("device", "peer", "host", "storage", "remote")}
    assert tiers == {"device": 16, "peer": 16, "host": 16, "storage": 0, "remote": 32}
    for module in answers:
        assert module.cached_tokens_details_from_dict(details).host == 64


def test_details_when_nothing_was_moved_then_they_still_say_who_held_the_prefix(sharing):
    span = {"dp_origin_kv_len": 0, "dp_max_kv_len": 96, "dp_max_kv_rank": 1}
    details = told(None, SimpleNamespace(**span))
    assert details == {"device": 0, "peer": 0, "host": 0, "storage": 0, **span}
    nothing = SimpleNamespace(dp_origin_kv_len=0, dp_max_kv_len=0, dp_max_kv_rank=-1)
    assert told(None, nothing) is None


def test_prompt_when_its_answer_is_streamed_then_its_tokens_are_counted_once(sharing, monkeypatch):
    rank = rank_that_counts()
    monkeypatch.setattr(report, "_linker", lambda: rank)
    req = SimpleNamespace(origin_input_ids=range(100), banyan_tokens={"peer": 40, "storage": 8})
    for _ in range(3):
        told({"device": 16, "host": 64}, req)
    told(None, SimpleNamespace(origin_input_ids=range(7)))
    counted = rank.counters.as_dict()
    assert [counted[f"{name}_tokens"] for name in ("prompt", "own", "peer", "host", "store")] == [107, 16, 40, 16, 8]


def test_details_when_tokens_were_computed_then_they_say_why(sharing, monkeypatch):
    asked = []
    rank = rank_that_counts()
    rank.computed = lambda req, cached_tokens: asked.append(cached_tokens) or {Why.NEW: 16, Why.TAIL: 4}
    monkeypatch.setattr(report, "_linker", lambda: rank)
    details = sent(origin_input_ids=range(100), banyan_tokens={"peer": 40})
    assert asked == [80]
    assert (details["computed_new"], details["computed_tail"]) == (16, 4)


def test_details_when_a_stream_goes_on_then_they_are_made_once(sharing, monkeypatch):
    monkeypatch.setattr(report, "_linker", rank_that_counts)
    req = SimpleNamespace(origin_input_ids=range(100), banyan_tokens={"peer": 40})
    first = told({"device": 16, "host": 64}, req)
    assert report.told_details(None, req) == (first,)
    assert told({"device": 16, "host": 64}, req) is first
    # Computed again from the beginning, after it had to make room.
    assert told({"device": 80, "host": 0}, req)["device"] == 80


def test_details_when_the_whole_prompt_was_the_ranks_own_then_its_length_is_the_origin(sharing):
    details = sent(dp_origin_kv_len=0, dp_max_kv_len=0, dp_max_kv_rank=-1)
    assert (details["dp_origin_kv_len"], details["dp_max_kv_len"]) == (16, 16)


@pytest.mark.parametrize("details", [None, {"device": 16, "host": 64}])
def test_details_when_they_are_switched_off_then_an_answer_has_none_and_the_prompt_is_counted(monkeypatch, details):
    monkeypatch.setattr(report.runtime, "config", lambda: Config(answer_details=False))
    rank = rank_that_counts()
    monkeypatch.setattr(report, "_linker", lambda: rank)
    span = {"dp_origin_kv_len": 16, "dp_max_kv_len": 96, "dp_max_kv_rank": 3}
    assert told(details, SimpleNamespace(origin_input_ids=range(100), banyan_tokens={"peer": 64}, **span)) is None
    assert rank.counters.prompt_tokens == 100 and rank.counters.peer_tokens == (64 if details else 0)


@pytest.mark.parametrize("config", [None, Config(share="off")])
def test_details_when_nothing_is_shared_then_they_are_sglangs(monkeypatch, config):
    monkeypatch.setattr(report.runtime, "config", lambda: config)
    details = {"device": 16, "host": 64}
    assert told(details, SimpleNamespace()) is details


def test_details_when_they_are_switched_off_and_nothing_is_shared_then_an_answer_has_none(monkeypatch):
    """SGLang's own say as well what others have sent."""
    monkeypatch.setattr(report.runtime, "config", lambda: Config(share="off", policy="sglang", answer_details=False))
    req = SimpleNamespace()
    assert told({"device": 16, "host": 64}, req) is None
    assert report.told_details(None, req) == (None,)


def test_prompt_when_its_pages_did_not_land_then_the_run_after_that_is_counted_alone(sharing, monkeypatch):
    rank = rank_that_counts()
    asked = []
    rank.computed = lambda req, cached_tokens: asked.append(cached_tokens) or {}
    monkeypatch.setattr(report, "_linker", lambda: rank)
    told({"device": 16, "host": 368}, SimpleNamespace(origin_input_ids=range(400), discard_output_reason="failed"))
    told({"device": 16, "host": 0}, SimpleNamespace(origin_input_ids=range(400)))
    assert (rank.counters.prompt_tokens, rank.counters.own_tokens, rank.counters.host_tokens) == (400, 16, 0)
    assert asked == [16]


def test_prompt_when_several_samples_are_asked_for_then_the_run_before_them_is_not_counted(sharing, monkeypatch):
    rank = rank_that_counts()
    monkeypatch.setattr(report, "_linker", lambda: rank)
    # As SGLang's TokenizerManager does: the prompt for itself first, answering nothing, then each sample.
    runs = [SamplingParams(n=4, max_new_tokens=0), *(SamplingParams(n=4, max_new_tokens=8) for _ in range(4))]
    cached = [{"device": 0, "host": 384}, *({"device": 384, "host": 0} for _ in range(4))]
    for params, details in zip(runs, cached, strict=True):
        told(details, SimpleNamespace(origin_input_ids=range(400), sampling_params=params))
    assert (rank.counters.prompt_tokens, rank.counters.own_tokens, rank.counters.peer_tokens) == (1600, 1536, 0)


def test_prompt_when_a_client_asks_for_no_token_then_it_is_counted(sharing, monkeypatch):
    rank = rank_that_counts()
    monkeypatch.setattr(report, "_linker", lambda: rank)
    told(None, SimpleNamespace(origin_input_ids=range(400), sampling_params=SamplingParams(max_new_tokens=0)))
    assert rank.counters.prompt_tokens == 400


def test_prompt_when_a_decode_server_is_told_what_its_prefill_server_found_then_it_counts_nothing(sharing, monkeypatch):
    rank = rank_that_counts()
    monkeypatch.setattr(report, "_linker", lambda: rank)
    monkeypatch.setattr(report, "_counts_prompts", False)
    told({"device": 384, "host": 0}, SimpleNamespace(origin_input_ids=range(400)))
    assert (rank.counters.prompt_tokens, rank.counters.own_tokens) == (0, 0)
