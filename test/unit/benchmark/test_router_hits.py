# SPDX-License-Identifier: Apache-2.0
"""The router's hits beside the engine's."""

from benchmark.router_hits import summarise


def test_summary_when_runs_differ_then_medians_are_compared_for_each_trace() -> None:
    runs = [
        {"trace": trace, "side": side, "cached_share": share, "num_errors": errors}
        for trace, side, share, errors in [
            ("a", "router", 0.2, 0),
            ("a", "router", 0.4, 1),
            ("a", "router", 0.3, 0),
            ("a", "engine", 0.5, 0),
            ("a", "engine", 0.4, 0),
            ("a", "engine", 0.6, 0),
            ("b", "router", 0.1, 0),
            ("b", "engine", 0.0, 0),
        ]
    ]
    first, second = summarise(runs)
    assert first["trace"] == "a" and first["num_errors"] == 1
    assert first["cached_share"]["router"] == {"median": 0.3, "min": 0.2, "max": 0.4}
    assert first["router_to_engine"] == 0.6
    assert second["router_to_engine"] is None
