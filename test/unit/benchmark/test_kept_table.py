# SPDX-License-Identifier: Apache-2.0
"""What stands below the tables of kept runs."""

from benchmark.kept_table import COLUMNS, command_of, wrapped


def test_command_when_a_run_is_kept_then_its_options_are_those_that_were_given():
    config = {"ranks": [1, 2], "case": ["of 64", "stream"], "quick": False, "apart": True, "seed": None, "out": "build"}
    assert command_of("benchmark.x", config) == "python -m benchmark.x --ranks 1 2 --case 'of 64' stream --apart"


def test_command_when_a_name_has_several_words_then_the_flag_has_hyphens():
    assert command_of("benchmark.x", {"link_repeats": 12}) == "python -m benchmark.x --link-repeats 12"


def test_text_when_it_is_wrapped_then_no_flag_is_broken():
    lines = wrapped(" ".join(["--link-repeats"] * 40)).splitlines()
    assert {word for line in lines for word in line.split()} == {"--link-repeats"}
    assert max(map(len, lines)) <= COLUMNS
