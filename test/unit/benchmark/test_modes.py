# SPDX-License-Identifier: Apache-2.0
"""The list of modes, how a row is judged, and the page that is made of what was found."""

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmark.modes import asking, run, table
from benchmark.modes.__main__ import wrong
from benchmark.modes.asking import Answer
from benchmark.modes.rows import MODES, Mode
from benchmark.modes.run import Found

PAGE = Path("docs/compatibility.md")


def served(**other):
    found = {"verdict": "served", "outputs_identical": True, "tokens_from": dict.fromkeys(asking.SOURCES, 16)}
    return Found(**{**found, **other})


def test_modes_when_listed_then_each_name_is_one_row():
    assert len({mode.name for mode in MODES}) == len(MODES)


def test_mode_when_it_needs_something_then_it_says_what():
    with pytest.raises(ValueError, match="what is needed"):
        Mode(name="x", flags=(), verdict="needs")
    with pytest.raises(ValueError, match="what is needed"):
        Mode(name="x", flags=(), verdict="served", needs="a GPU")


def test_page_when_committed_then_it_has_the_rows_of_the_list():
    assert table.listed(PAGE.read_text()) == table.expected()


def test_page_when_made_then_a_row_carries_what_was_found():
    rows = [{"mode": mode.name, "where": "abc", **asdict(served(verdict=mode.verdict, line="a | b"))} for mode in MODES]
    rows[1]["where"] = "commit abc-moved"
    rows[0]["tokens_from"] = {"device": 1, "peer": 2, "host": 3, "storage": 4}
    rows[0]["largest_logit_difference"] = 0.0125
    text = table.page(rows)
    assert table.listed(text) == table.expected()
    first = next(line for line in text.splitlines() if line.startswith(f"| {MODES[0].name} |"))
    assert "| 1 | 2 | 3 | 4 | identical; both at work: within 0.0125 |" in first
    assert "a \\| b" in text
    num_idle = sum(mode.verdict == "needs" for mode in MODES)
    said = f"Runs: {len(MODES) - 1 - num_idle} rows at abc; 1 row at commit abc-moved; {num_idle} did not run. `-moved`"
    assert said in " ".join(text.split())


def test_page_when_rows_do_not_exercise_their_mode_then_it_names_them():
    """One request at a time never waits, and is alone in its batch."""
    assert set(table.NOT_EXERCISED) <= {mode.name for mode in MODES if mode.verdict == "served"}
    said = " ".join(PAGE.read_text().partition("## Served")[0].split())
    assert all(f"*{name}*" in said for name in table.NOT_EXERCISED) and "Runs: " in said
    assert table.WITHOUT_A_ROW in PAGE.read_text()


def test_page_when_a_mode_did_not_come_out_as_listed_then_it_is_not_called_served():
    crashed = {"mode": MODES[0].name, "where": "commit abc", **asdict(Found(verdict="crashed", line="KeyError"))}
    for rows in ([], [crashed]):
        text = table.page(rows)
        assert table.listed(text) == table.expected()
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {MODES[0].name} |"))
        assert line.endswith(f"{table.NOT_YET} |")


@pytest.mark.parametrize(
    "found, reason",
    [
        (served(), None),
        (served(outputs_identical=False), "outputs"),
        (served(largest_logit_difference=2 * asking.LOGIT_TOLERANCE), "log probabilities"),
        (served(share_of_one_rank=0.9), "0.9 of what one rank"),
        (served(verdict="useless"), "useless instead of served"),
        (Found(verdict="crashed", line="KeyError: 'x'"), "KeyError"),
    ],
)
def test_row_when_it_is_not_as_the_list_says_then_the_reason_is_named(found, reason):
    said = wrong(MODES[0], found)
    assert said is None if reason is None else reason in said


def test_end_when_banyan_refuses_then_it_is_a_refusal_with_its_line():
    log = "loading\nbanyan: refused: --page-size 1: too small: use 16\nTraceback (most recent call last)\nRefused: x"
    assert run.ended(log) == Found(verdict="refused", line="--page-size 1: too small: use 16")


def test_end_when_nobody_refuses_then_it_is_a_crash_with_the_error():
    found = run.ended("loading\nTraceback (most recent call last)\n  File x\nAttributeError: gone\nbye")
    assert found.verdict == "crashed" and found.line == "AttributeError: gone"


def test_row_when_its_server_ends_in_the_middle_then_it_is_a_crash_with_the_error(monkeypatch, tmp_path):
    def served(mode, folder):
        (folder / "on.log").write_text("up\nTraceback (most recent call last)\nZeroDivisionError: division by zero\n")
        raise ConnectionResetError

    monkeypatch.setattr(run, "_served", served)
    found = run.run(MODES[0], tmp_path)
    assert (found.verdict, found.line) == ("crashed", "ZeroDivisionError: division by zero")


def test_answers_when_compared_then_what_was_said_counts_and_sources_are_summed():
    ours = [Answer((1, 2), {"peer": 32}, -1.0), Answer((3,), {"peer": 16, "host": 16}, -2.0)]
    theirs = [Answer((1, 2), {}, -1.25), Answer((4,), {}, -2.0)]
    assert asking.differences(ours, theirs) == 1
    assert asking.tokens_from(ours) == {"device": 0, "peer": 48, "host": 16, "storage": 0}
    assert asking.widest(ours, theirs) == 0.25


def test_questions_when_asked_in_turn_then_the_second_round_meets_the_next_rank():
    asked = []
    asking.in_turn(lambda ids, rank: asked.append((ids[0], rank)) or Answer(()), 2, [[0], [1], [2]])
    assert asked == [(0, 0), (1, 1), (2, 0), (0, 1), (1, 0), (2, 1)]
