# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmark.rate_sweep import Load, figures, verdicts
from benchmark.rates_page import mean_ttft_to_router, page
from benchmark.records import Answer


def run():
    answers = [Answer(ttft_s=ttft_s, prompt_tokens=100, cached_tokens=90) for ttft_s in (0.1, 0.3, 2.0)]
    load = Load(0.5, 4.0, ((1,),) * 4, (0.0,) * 4)
    rate = figures(load, [*answers, Answer(error="gone")], 1.0)
    late = figures(load, [Answer(ttft_s=4.0, prompt_tokens=100, cached_tokens=80)] * 4, 1.0)
    systems = {"banyan": [{"idle_hit_s": 0.2, "rates": [rate]}, {"idle_hit_s": 0.4, "rates": [late]}]}
    where = {"commit": "a" * 40, "date": "2026-11-28T00:00:00", "hardware": {"cpu_model": "Some", "num_cores": 2}}
    sizes = {"num_conversations": 3, "history_tokens": 3000, "pool_tokens": 4000}
    config = {"data": "sharegpt", "seconds": 45.0, "quick": False}
    return {"systems": systems, "verdicts": verdicts(systems), "sizes": sizes, "config": config, "provenance": where}


def test_page_when_a_request_failed_then_it_counts_as_sent_and_as_late():
    assert (
        "| banyan | banyan_cpu | 0.5 | 2 | 8 | 0.12, 0.25 | 0.25 (0.00-0.50) | 2.40, 2.15, 2.83 s | - | 85.0% | 1 |"
    ) in page(run())


def test_page_when_the_router_was_asked_as_often_then_means_are_compared_within_a_repetition():
    some = run()
    some["systems"]["router"] = list(reversed(some["systems"]["banyan"]))
    ratio = 4.0 / 0.8
    assert mean_ttft_to_router(some, "banyan", "0.5")["values"] == pytest.approx([1 / ratio, ratio])


def test_page_when_it_is_read_then_the_command_and_what_each_system_carried_stand_below():
    said = " ".join(page(run()).split())
    assert "`python -m benchmark.rate_sweep --data sharegpt --seconds 45.0`" in said
    assert "at the best rate: banyan 0.25 (0.00-0.50). An idle hit: banyan 0.30 s" in said
