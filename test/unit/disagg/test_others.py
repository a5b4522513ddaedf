# SPDX-License-Identifier: Apache-2.0
"""Each server of a pair remembers what the other one's part makes necessary."""

from banyan.disagg import Others, Role


def test_decode_server_when_a_prompt_came_then_it_keeps_the_answer_and_looks_nothing_up():
    others = Others(Role.DECODE, lambda: 0.0)
    others.came(["a", "b"], "known")
    assert others.to_keep(["a", "b", "c"]) == ["c"]
    assert others.arrivals.to_look_up(1) == []


def test_prefill_server_when_a_prompt_came_then_it_keeps_all_and_looks_it_up_again():
    others = Others(Role.PREFILL, lambda: 0.0)
    others.came(["a", "b"], "known")
    assert others.to_keep(["a", "b", "c"]) == ["a", "b", "c"]
    assert others.arrivals.to_look_up(1) == [(["a", "b"], "known")]
