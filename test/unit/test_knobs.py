# SPDX-License-Identifier: Apache-2.0
import argparse
from dataclasses import dataclass

import pytest
from scripts.tables import knob_table

from banyan import knobs
from banyan.knobs import at_least, knob


@dataclass(frozen=True)
class Settings:
    rows: int = knob(3, "--rows", "table", "Rows, 50 % of them\n  full.", metavar="N", check=at_least(1))
    loud: bool = knob(True, "--quiet", "table", "Say nothing.", switches_to=False)
    place: str = knob(
        "", "--place", "elsewhere", "Where.", metavar="DIR", parse=str.upper, const="here", unset="nowhere"
    )
    colour: str = knob("red", "--colour", "table", "Which.", choices=("red", "blue"), is_open=True, unset="red")
    hidden: int = 7


def parsed(*argv):
    parser = argparse.ArgumentParser()
    knobs.add_to(parser, Settings)
    assert "50 % of them full" in parser.format_help()
    return knobs.take_from(vars(parser.parse_args(argv)), Settings)


def test_flags_when_none_is_given_then_defaults_hold_and_open_ones_are_left_out():
    assert parsed() == {"rows": 3, "loud": True, "place": ""}


def test_flags_when_given_then_parsed_switched_and_filled():
    assert parsed("--rows", "4", "--quiet", "--place", "--colour", "blue") == {
        "rows": 4,
        "loud": False,
        "place": "HERE",
        "colour": "blue",
    }


@pytest.mark.parametrize(
    ("values", "line"),
    [({"rows": 0}, "--rows 0: at least 1"), ({"rows": float("nan")}, "--rows nan"), ({"colour": "green"}, "red, blue")],
)
def test_check_when_a_value_is_out_of_range_then_its_flag_is_named(values, line):
    with pytest.raises(ValueError, match=line):
        knobs.check(Settings(**values))


def test_table_when_printed_then_it_holds_the_knobs_of_its_group():
    rows = knob_table(Settings, "table").splitlines()
    assert rows[2:] == [
        "| `--rows N` | 3 | Rows, 50 % of them full. |",
        "| `--quiet` | off | Say nothing. |",
        "| `--colour red\\|blue` | red | Which. |",
    ]
