# SPDX-License-Identifier: Apache-2.0
import pytest
from bench_fakes import record, run_result

from benchmark.compare import across_repetitions, mean_ttft_ratio
from benchmark.metrics import distribution, paired_ratio, spread, summarise
from benchmark.outputs import compare_outputs


def test_distribution_when_known_values_then_linear_percentiles() -> None:
    figures = distribution([4, 1, 3, 2], scale=10)
    assert figures is not None
    assert figures["mean"] == 25 and figures["min"] == 10 and figures["max"] == 40
    assert figures["p50"] == 25 and figures["p90"] == pytest.approx(37) and figures["p99"] == pytest.approx(39.7)
    assert distribution([]) is None


def test_summary_when_one_failed_then_counted_but_not_measured() -> None:
    records = [
        record("a", dp_rank=0, cached_tokens=40, cached_tokens_details={"device": 8, "peer": 32}, itl_s=[0.1] * 5),
        record("b", dp_rank=1, cached_tokens=10, ttft_s=1.5, latency_s=2.5, itl_s=[0.3] * 5),
        record("c", error="ServerError: no", ttft_s=None, latency_s=99.0, prompt_tokens=0),
    ]
    summary = summarise(records, total_time_s=4.0)
    assert (summary["num_requests"], summary["num_completed"], summary["num_errors"]) == (3, 2, 1)
    assert summary["errors"] == ["c#0: ServerError: no"]
    assert summary["completed_per_s"] == 0.5
    assert summary["nominal_tokens"] == 318
    assert summary["served_tokens"] == 212
    assert summary["cached_share"] == 0.25
    assert summary["cached_by_source"] == {"device": 8, "peer": 32, "host": 0, "storage": 0, "untold": 10}
    assert summary["by_rank"]["1"] == {"num_requests": 1, "prompt_tokens": 100, "cached_tokens": 10}
    assert summary["ttft_s"]["mean"] == 1.0
    assert summary["latency_s"]["max"] == 2.5
    assert summary["time_per_output_token_ms"]["min"] == pytest.approx(100)
    assert summary["inter_token_latency_ms"]["mean"] == pytest.approx(200)
    assert summary["latency_per_token_ms"]["min"] == pytest.approx(1e3 / 106, rel=1e-4)


def test_summary_when_all_failed_then_no_figures_but_no_crash() -> None:
    summary = summarise([record(error="x", ttft_s=None)], total_time_s=1.0)
    assert summary["ttft_s"] is None and summary["cached_share"] is None


def test_ratio_when_paired_then_of_each_repetition() -> None:
    assert paired_ratio([1, 2, 9], [2, 2, 3]) == {"median": 1, "min": 0.5, "max": 3, "values": [0.5, 1, 3]}
    assert spread([]) is None


def test_mean_ttft_ratio_when_a_repetition_lacks_one_side_then_left_out() -> None:
    results = [
        run_result("on", 2, 1, record(ttft_s=0.2)),
        run_result("off", 2, 1, record(ttft_s=0.4)),
        run_result("on", 2, 2, record(ttft_s=0.3)),
        run_result("on", 1, 1, record(ttft_s=9.0)),
    ]
    ratio = mean_ttft_ratio(results, "on", "off", 2)
    assert ratio is not None
    assert ratio["values"] == [0.5]
    assert mean_ttft_ratio(results, "on", "off", 3) is None


def test_across_repetitions_when_three_then_median_and_spread() -> None:
    results = [run_result("on", 1, i, record(ttft_s=ttft_s)) for i, ttft_s in enumerate((0.3, 0.1, 0.2), start=1)]
    figures = across_repetitions(results, "on", 1)
    assert figures["ttft_s_mean"] == {"median": 0.2, "min": 0.1, "max": 0.3, "values": [0.3, 0.1, 0.2]}
    assert figures["cached_by_source"]["peer"]["median"] == 0


def test_outputs_when_one_token_differs_then_the_place_is_told() -> None:
    results = [
        run_result("on", 1, 1, record("a", output_ids=[1, 2, 3]), record("b", output_ids=[1, 9, 3], position=1)),
        run_result("stock", 1, 1, record("a", output_ids=[1, 2, 3]), record("b", output_ids=[1, 2, 3], position=1)),
    ]
    verdict = compare_outputs(results, "on", "stock")
    assert not verdict["identical"]
    assert (verdict["num_compared"], verdict["num_differing"]) == (2, 1)
    assert verdict["differences"][0]["request"] == "b#0"
    assert verdict["differences"][0]["first_differing_token"] == 1


def test_outputs_when_nothing_or_only_a_part_to_compare_then_not_identical() -> None:
    assert not compare_outputs([run_result("on", 1)], "on", "stock")["identical"]
    half = [run_result("on", 1, 1, record("a")), run_result("stock", 1, 1, record("a"), record("b", position=1))]
    assert compare_outputs(half, "on", "stock")["num_without_counterpart"] == 1
    assert not compare_outputs(half, "on", "stock")["identical"]
    assert compare_outputs([run_result("on", 1), run_result("stock", 1)], "on", "stock")["identical"]
