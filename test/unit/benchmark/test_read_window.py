# SPDX-License-Identifier: Apache-2.0
"""What a window of layers is worth, by arithmetic."""

from dataclasses import replace

import pytest

from benchmark.read_window import Case, first_token_s

PROMPT = Case("llama3-8b", 1, 65536, 2 << 30, 7e9, queue_s=0.0)
ENOUGH = replace(PROMPT, lent_bytes=1e12)


def test_prefix_when_the_arena_lends_enough_then_a_window_changes_nothing():
    assert first_token_s(ENOUGH, has_window=True) == first_token_s(ENOUGH, has_window=False)


def test_window_when_the_request_is_served_at_once_then_it_is_as_quick_as_an_arena_that_lends_enough():
    window = first_token_s(PROMPT, has_window=True)
    assert window == pytest.approx(first_token_s(ENOUGH, has_window=False))
    assert first_token_s(PROMPT, has_window=False) > 2 * window, "what is not read is computed"


def test_window_when_the_request_waits_then_what_it_could_not_hold_is_still_to_be_read():
    waiting = replace(PROMPT, queue_s=5.0)
    late_s = (65536 * 131072 - (2 << 30)) / 7e9
    window = first_token_s(waiting, has_window=True)
    enough = first_token_s(replace(ENOUGH, queue_s=5.0), has_window=False)
    assert enough < 5.2, "all of it came while it waited"
    assert 0.8 * late_s < window - enough < late_s
