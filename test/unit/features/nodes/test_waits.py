# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.features.nodes.questions import Best
from banyan.features.nodes.waits import FIRST_WORD_S, MOST_READ_S, SILENCE_S, Waits


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def waits(clock):
    made = Waits(clock)
    made.begin(7, 2)
    return made


def test_remote_prefetch_when_it_is_answered_then_it_is_over_once(waits, clock):
    assert waits.answered(7, 2, 5) == Best(7, 2, 5)
    assert waits.answered(7, 2, 5) is None
    clock.now_s += 1_000
    assert waits.expire() == ([], [])


def test_remote_prefetch_when_nothing_was_brought_then_nobody_has_it(waits):
    assert waits.answered(7, 2, 0) == Best(7, -1, 0)


def test_remote_prefetch_when_another_node_answers_then_that_is_none(waits, clock):
    assert waits.answered(7, 1, 5) is None
    waits.heard(7, 1)
    clock.now_s += FIRST_WORD_S
    assert waits.expire() == ([Best(7, -1, 0)], [2])


def test_remote_prefetch_when_its_node_says_nothing_then_it_is_over_soon_and_the_node_is_silent(waits, clock):
    clock.now_s += 0.9 * FIRST_WORD_S
    assert waits.expire() == ([], [])
    waits.heard(7, 2)
    clock.now_s += 0.9 * SILENCE_S
    assert waits.expire() == ([], [])
    clock.now_s += 0.2 * SILENCE_S
    assert waits.expire() == ([Best(7, -1, 0)], [2])
    assert waits.expire() == ([], [])


def test_remote_prefetch_when_its_node_is_alive_and_slow_then_it_is_over_after_a_while(waits, clock):
    for _ in range(round(MOST_READ_S)):
        assert waits.expire() == ([], [])
        waits.heard(7, 2)
        clock.now_s += 1
    assert waits.expire() == ([Best(7, -1, 0)], [])
