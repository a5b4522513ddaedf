# SPDX-License-Identifier: Apache-2.0
from benchmark import pd_classes


def row(idle, marked, unmarked, rate):
    """Bounded pulls in the middle of the two others, and slower than they."""
    return {
        "idle_p99_us": idle,
        "marked_p99_us": marked,
        "copying_p99_us": 1.1 * idle,
        "bounded_p99_us": (marked + unmarked) / 2,
        "unmarked_p99_us": unmarked,
        "marked_bytes_per_s": rate,
        "bounded_bytes_per_s": rate / 2,
        "unmarked_bytes_per_s": rate,
    }


def test_figures_when_rounds_differ_then_medians_of_their_ratios():
    rows = [row(100, 120, 900, 115e6), row(200, 200, 2000, 110e6), row(100, 400, 500, 120e6)]
    found = pd_classes.figures(rows)
    assert (found["high_class_p99_ratio"], found["high_class_p99_ratio_unmarked"]) == (1.2, 9.0)
    assert (found["high_class_p99_ratio_bounded"], found["high_class_p99_ratio_copying"]) == (5.1, 1.1)
    assert (found["pulls_path_share"], found["pulls_path_share_bounded"]) == (0.92, 0.46)


def test_messages_when_nothing_is_beside_them_then_each_has_a_time():
    with pd_classes.Messages() as messages:
        times_us = messages.times_us(0.05)
    assert times_us and min(times_us) > 0


def test_pulls_when_they_run_then_bytes_come(monkeypatch):
    monkeypatch.setattr(pd_classes, "SETTLE_S", 0.0)
    with pd_classes.pulling(pd_classes.LOW_DSCP, pd_classes.IN_FLIGHT_BYTES) as num_bytes:
        assert num_bytes.value > 0
