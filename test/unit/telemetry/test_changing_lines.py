# SPDX-License-Identifier: Apache-2.0
import random
import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.telemetry import changing_lines as module
from banyan.telemetry.changing_lines import ChangingLines, Parting, num_common

RNG = random.Random(3)
SYSTEM = [RNG.randrange(50_000) for _ in range(300)]


def words(name, count):
    rng = random.Random(name)
    return [rng.randrange(50_000) for _ in range(count)]


def prompt(*parts):
    return array("q", [token for part in parts for token in part])


def ask(lines, *prompts, session="s"):
    return [lines.asked(session, one) for one in prompts]


def turns(count, who="user"):
    """A conversation: each turn goes on from the one before."""
    said = [words(f"{who} {number}", 80) for number in range(count)]
    return [[token for part in said[: number + 1] for token in part] for number in range(count)]


def test_asked_when_each_turn_goes_on_from_the_last_then_nothing_has_parted():
    assert ask(ChangingLines(), *(prompt(SYSTEM, turn) for turn in turns(5))) == [None] * 5


@pytest.mark.parametrize("length", [1, 12, 200])
def test_asked_when_a_line_at_the_head_changes_each_turn_then_it_is_named_by_the_third(length):
    lines = ChangingLines()
    found = ask(
        lines,
        *(prompt(SYSTEM[:20], words(f"line {number}", length), SYSTEM, turn) for number, turn in enumerate(turns(5))),
    )
    assert found == [None, *(Parting(20, number) for number in (2, 3, 4, 5))]
    assert [one.is_line for one in found[1:]] == [False, True, True, True]


def test_asked_when_the_line_grows_then_it_is_still_a_line():
    heads = [words("a", 4), words("b", 9), words("c", 40)]
    found = ask(ChangingLines(), *(prompt(SYSTEM[:20], head, SYSTEM) for head in heads))
    assert found[-1] == Parting(20, 3)


def test_asked_when_prompts_begin_alike_and_are_others_then_it_is_no_line():
    found = ask(ChangingLines(), *(prompt(SYSTEM, words(f"other {number}", 200)) for number in range(6)))
    assert found == [None, *[Parting(300, 1)] * 5]


def test_asked_when_agents_take_turns_under_one_name_then_each_goes_on_from_its_own():
    lines = ChangingLines()
    agents = [[prompt(SYSTEM[: 50 * agent], turn) for turn in turns(4, f"agent {agent}")] for agent in range(3)]
    found = ask(lines, *(turn for together in zip(*agents, strict=True) for turn in together))
    assert found[3:] == [None] * 9


def test_asked_when_a_turn_is_asked_again_or_cut_short_then_nothing_has_parted():
    turn = prompt(SYSTEM, words("a", 50))
    assert ask(ChangingLines(), turn, turn, turn[:200], turn) == [None] * 4


def test_asked_when_the_place_moves_with_the_turns_then_it_is_not_the_same_line():
    """As where thoughts are stripped from the turn before."""
    lines = ChangingLines()
    found = []
    for number, turn in enumerate(turns(6)):
        found.append(lines.asked("s", prompt(SYSTEM, turn[:-80], words(f"thought {number}", 5), turn[-80:])))
    assert not any(one.is_line for one in found if one is not None)


def test_asked_when_sessions_are_many_or_long_then_no_more_is_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_SESSIONS", 10)
    monkeypatch.setattr(module, "MOST_TOKENS", 5_000)
    lines = ChangingLines()
    for number in range(200):
        lines.asked(f"s{number % 30}\ud800", prompt(words(str(number), number * 7 % 900)))
        held = sum(len(one.row) // 8 for threads in lines._sessions.values() for one in threads)
        assert held == lines._num_tokens <= 5_000 and len(lines._sessions) <= 10
    lines.asked("long", prompt(words("long", 6_000)))
    assert (lines._sessions, lines._num_tokens) == ({}, 0)


def test_asked_when_the_names_of_sessions_are_long_then_they_take_no_more_memory():
    lines = ChangingLines()
    tracemalloc.start()
    try:
        for number in range(40):
            lines.asked(f"{number}{'x' * 1_000_000}", array("q", [1]))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(lines._sessions) == 40 and kept_bytes < 100_000


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=90)), max_size=12))
def test_asked_when_prompts_are_any_then_places_lie_in_them_and_the_count_is_right(asked):
    lines = ChangingLines()
    for session, tokens in asked:
        found = lines.asked(str(session), array("q", tokens))
        assert found is None or 0 <= found.place < len(tokens)
        held = sum(len(one.row) // 8 for threads in lines._sessions.values() for one in threads)
        assert held == lines._num_tokens


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_num_common_when_rows_are_any_then_it_is_their_common_beginning(start, one, other):
    one, other = start + one, start + other
    num = num_common(one, other)
    assert one[:num] == other[:num] and (num == min(len(one), len(other)) or one[num] != other[num])
