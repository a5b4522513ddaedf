# SPDX-License-Identifier: Apache-2.0
"""Patterns that keep Python's matcher busy for ever are told from others."""

import re
import time

import pytest

from banyan.sglang_plugin.stop_regex import may_not_end

ENDLESS = [
    *("(a+)+b", "(a*)*$", "(a|a)*b", "(a|ab)*c", "((a{1,100}){1,100})x", "(?:(?:x?){50})+y", "(.*,)*!", "(?=(a+)+b)"),
    *("(?P<n>a+)*b", "([ab]+|c)*d", "(a+?)+?b", "(a{1,3})+b", "((a)?(?(2)b+|c))*d"),
]
HARMLESS = [
    *(
        "",
        "a+b",
        "abc",
        r"\\n\\n",
        "(foo|bar)+",
        "[0-9]+\\\\.[0-9]*",
        "(ab){3}",
        "(a+)(b+)",
        ".*x",
        "^(yes|no)$",
    ),
    *("(?:ab)*c", "(?<!a)b+", "(?>a+)b", "a++b"),
]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_pattern_when_it_may_be_tried_in_too_many_ways_then_it_is_told(pattern):
    assert may_not_end(pattern)


@pytest.mark.parametrize("pattern", HARMLESS)
def test_pattern_when_it_is_an_ordinary_one_then_it_is_let_pass_and_ends(pattern):
    assert not may_not_end(pattern)
    began_s = time.process_time()
    for text in ("a" * 2_000, "ab" * 1_000, "foobar" * 300):
        re.search(pattern, text)
    assert time.process_time() - began_s < 5


def test_pattern_when_it_is_none_then_the_error_is_pythons():
    with pytest.raises(re.error):
        may_not_end("(")
