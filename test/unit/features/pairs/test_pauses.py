# SPDX-License-Identifier: Apache-2.0
from banyan.features.pairs.pauses import FIRST_PAUSE_S, LAST_PAUSE_S, Pauses


def test_pauses_when_nothing_is_to_be_done_then_they_grow_to_a_bound_and_begin_anew_after_work():
    paused_s = []
    pauses = Pauses(paused_s.append)
    pauses.between_steps(has_work=True)
    assert paused_s == []
    for _ in range(30):
        pauses.between_steps(has_work=False)
    assert paused_s[0] == FIRST_PAUSE_S and paused_s[-1] == LAST_PAUSE_S and paused_s == sorted(paused_s)
    pauses.between_steps(has_work=True)
    pauses.between_steps(has_work=False)
    assert paused_s[30:] == [FIRST_PAUSE_S]
