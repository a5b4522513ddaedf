# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.pacing import MAX_WRITE_DEPTH, DeviceLoad, num_writes_allowed


@pytest.mark.parametrize(
    ("load", "slack_us", "expected"),
    [
        (DeviceLoad(0, 0), math.inf, 2),
        (DeviceLoad(0, 1), math.inf, 1),
        (DeviceLoad(0, 2), math.inf, 0),
        (DeviceLoad(0, 5), math.inf, 0),
        (DeviceLoad(1, 0), math.inf, 0),
        (DeviceLoad(0, 0), 250.0, 2),
        (DeviceLoad(0, 0), 199.0, 1),
        (DeviceLoad(0, 1), 199.0, 0),
        (DeviceLoad(0, 0), 99.0, 0),
        (DeviceLoad(0, 0), 0.0, 0),
    ],
)
def test_gate_when_asked_then_reads_first_slack_next_depth_last(load, slack_us, expected):
    assert num_writes_allowed(load, slack_us=slack_us, write_us=100.0) == expected


counts = st.integers(0, 8)
times = st.floats(0, 1e6)


@given(counts, counts, times, st.floats(0.1, 1e6), times)
def test_gate_when_anything_is_asked_then_its_three_rules_hold(num_reads, num_writes, slack_us, write_us, more_us):
    load = DeviceLoad(num_reads, num_writes)
    allowed = num_writes_allowed(load, slack_us=slack_us, write_us=write_us)
    assert num_reads == 0 or allowed == 0
    assert allowed == 0 or num_writes + allowed <= MAX_WRITE_DEPTH
    assert allowed == 0 or (num_writes + allowed) * write_us <= slack_us
    assert num_writes_allowed(load, slack_us=slack_us + more_us, write_us=write_us) >= allowed
