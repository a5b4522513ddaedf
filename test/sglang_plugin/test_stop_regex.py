# SPDX-License-Identifier: Apache-2.0
"""Patterns that keep Python's matcher busy for ever are told from others."""

import re
import time

import pytest

from banyan.sglang_plugin import stop_regex
from banyan.sglang_plugin.stop_regex import may_not_end

ENDLESS = [
    *("(a+)+b", "(a*)*$", "(a|a)*b", "(a|ab)*c", "((a{1,100}){1,100})x", "(?:(?:x?){50})+y", "(.*,)*!", "(?=(a+)+b)"),
    *("(?P<n>a+)*b", "([ab]+|c)*d", "(a+?)+?b", "(a{1,3})+b", "((a)?(?(2)b+|c))*d"),
    *(".*.*x", "[a-z]+[a-z]+1", ".*foo.*bar", "a?" * 30 + "x", "(?:a|aa)" * 25 + "x", ".{0,999}.{0,999}x"),
    *("(.*){8}x", r"(.*,){3}x", r"\d*[a-z]*\d*x", r"\w+(x|\w+)\w+", r"(?=.*a)\w*\w*x", r"(a*)(?:\1)*x"),
    *("(?i)a*A*x", "(?i:a*)A*x", r"[\u0400-\u04ff]*[\u0410-\u0420]*x", "((((a{0,8}){8}){8}){8})x"),
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
    *(r"\d+\.\d+", r"[A-Z]\w+\s+\w+", r"\n\s{0,9}\n\s{0,9}\n", r"Observation:.*\n.*x", r"\d+[a-z]+x", r"```\s*$"),
    *(r"(\d{1,3}\.){3}\d{1,3}", r"(\d+\.\d+|x+y+)z", r"(?:\n|^)(?:User|Human)\s*:", r"\[[^\]]*\]\([^)]*\)", "a?" * 14),
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


@pytest.mark.parametrize("pattern", ["(a?|b?)" * 30, "((((a?b){8}){8}){8}){8}", "x?" * 100, "[^a]?[^b]" * 28])
def test_pattern_when_it_is_made_to_be_long_to_look_at_then_that_ends_soon(pattern):
    began_s = time.process_time()
    assert may_not_end(pattern)
    assert time.process_time() - began_s < 5


def nested(depth):
    pattern = "xyz"
    for _ in range(depth):
        pattern = "(a?|)" * 4 + f"(?:{pattern})*+"
    return pattern


@pytest.mark.parametrize("pattern", [nested(9), "(?:a?|b?)" * 4 + "x" * 200])
def test_pattern_when_its_choices_stand_before_much_else_then_each_part_is_looked_at_once(pattern):
    began_s = time.process_time()
    may_not_end(pattern)
    assert time.process_time() - began_s < 5


def test_pattern_when_each_prompt_of_a_batch_has_it_then_it_is_looked_at_once(monkeypatch):
    looks, parse = [], stop_regex.parser.parse
    monkeypatch.setattr(stop_regex.parser, "parse", lambda pattern: looks.append(pattern) or parse(pattern))
    assert not any(may_not_end("of a batch: x+y") for _ in range(300))
    assert looks == ["of a batch: x+y"]


@pytest.mark.parametrize(
    ("pattern", "most"),
    [("abcdefgh" * 30 + "x*y*", 0), ("(?i)" + "abcdefgh" * 30 + "x*y*", 10), ("[ab][cd]" * 30 + "x*y*", 2)],
)
def test_pattern_when_parts_of_it_take_the_same_letters_then_these_are_looked_up_once(pattern, most, monkeypatch):
    compiled, made = [], stop_regex.compiler.compile
    monkeypatch.setattr(stop_regex.compiler, "compile", lambda part: compiled.append(part) or made(part))
    may_not_end(pattern)
    assert len(compiled) <= most


def test_pattern_when_it_is_none_then_the_error_is_pythons():
    with pytest.raises(re.error):
        may_not_end("(")
