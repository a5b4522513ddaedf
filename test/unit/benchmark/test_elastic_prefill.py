# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from banyan.routing import POLICIES
from benchmark.elastic_prefill import WAYS


def test_ways_when_they_are_compared_then_only_one_may_take_a_detour_and_all_say_so():
    gates = {way: payload["elastic_prefill_tokens"] for way, payload in WAYS.items()}
    assert [way for way, gate in gates.items() if gate is not None] == ["detour"]
    assert {payload.get("policy", "lmetric") for payload in WAYS.values()} <= set(POLICIES)
