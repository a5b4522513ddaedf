# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from banyan.routing import Dispatcher
from banyan_lab.sim import break_even
from banyan_lab.sim.break_even import ONE_WORKER, SEPARATED, TWO_WORKERS, answered, site


def alone(workers, prompt_tokens=8000, output_tokens=11, **changes):
    here = replace(site(*workers), **changes)
    return answered(here, prompt_tokens, concurrency=1, output_tokens=output_tokens, num_requests=4)


def test_worker_when_alone_then_the_published_prefill_and_its_steps():
    """A closed form: a prefill, ten steps. The prefill time is the source's, so the rate must give it back."""
    here = site(*ONE_WORKER)
    found = alone(ONE_WORKER)
    step_s = here.decode.step_s(num_requests=1, context_tokens=8000 + 5)
    assert found.ttft_s == pytest.approx(0.173)
    assert found.itl_s == pytest.approx(step_s)
    assert found.tokens_per_s == pytest.approx(11 / (0.173 + 10 * step_s))


def test_worker_when_separated_and_alone_then_the_hand_over_comes_behind_the_prefill():
    kv_bytes = 8000 * site(*SEPARATED).prefill.model.kv_bytes_per_token
    assert alone(SEPARATED).ttft_s == pytest.approx(0.173 + kv_bytes / 9.6e9)
    assert alone(SEPARATED, copy_bytes_per_s=1e30).ttft_s == pytest.approx(0.173)


def test_decode_worker_when_as_full_as_published_then_the_published_step():
    decode, batch = site(*SEPARATED).decode, 248 * 0.0169
    assert decode.step_s(num_requests=batch, context_tokens=batch * 8000) == pytest.approx(0.0169)


def test_separated_workers_when_prompts_are_long_then_the_prefill_worker_is_the_bound():
    found = answered(site(*SEPARATED), 8000, concurrency=10, output_tokens=50, num_requests=200)
    assert found.tokens_per_s == pytest.approx(50 / 0.173, rel=0.01)


def test_mixed_forwards_when_others_prefill_then_a_token_comes_with_each_chunk_and_else_it_waits_for_both():
    """Ten in flight, each meets the prefills of the nine others: a step for each is a forward of theirs when mixed."""
    runs = [
        answered(replace(site(*ONE_WORKER), mixes=mixes), 8000, concurrency=10, output_tokens=50, num_requests=200)
        for mixes in (True, False)
    ]
    assert runs[0].tokens_per_s > runs[1].tokens_per_s
    step_s = site(*ONE_WORKER).decode.step_s(num_requests=5, context_tokens=5 * 8000)
    cycle_s = 10 * 0.173 + 40 * step_s
    assert runs[0].tokens_per_s == pytest.approx(500 / cycle_s, rel=0.05)


def test_gain_when_prompts_grow_then_separation_pays_against_half_of_the_gpus():
    assert break_even.gain(1000) < 5 < break_even.gain(4000)
    assert break_even.gain(8000, TWO_WORKERS) < break_even.gain(8000, ONE_WORKER)


def test_figures_when_listed_then_each_published_length_has_two_and_misses_say_why():
    rows = list(break_even.figures())
    published = [row for row in rows if row.published is not None]
    assert len(published) == 2 * len(break_even.PUBLISHED) + 1 + 3 + 1
    assert [row.name for row in published if row.lands is False and not row.note] == []


def test_study_when_the_dispatcher_is_taken_away_then_it_stops(monkeypatch):
    class Asked(Exception):
        pass

    def ask(*args, **kwargs):
        raise Asked

    monkeypatch.setattr(Dispatcher, "place", ask)
    with pytest.raises(Asked):
        alone(ONE_WORKER)
