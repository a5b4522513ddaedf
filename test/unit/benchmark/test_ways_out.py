# SPDX-License-Identifier: Apache-2.0
"""Ways out of refusals: read off the line that names them, and followed until nothing is refused."""

from pathlib import Path

import pytest

from banyan.refusals import ServerFacts, refusals
from banyan.refusals.modes import ModeFacts, mode_refusals
from banyan.refusals.speculation import DraftFacts
from benchmark.recipes.lines import Line, Verdict
from benchmark.recipes.ways_out import applied, outcome, tried

LINE = Line(name="a", family="Llama", model=Path("m"), arguments=("--tp", "8", "--pp-size", "2"))
PP = "--pp-size 2: stages may disagree: use --pp-size 1"


@pytest.mark.parametrize(
    ("facts", "words", "expected"),
    [
        (ServerFacts(pp_size=4), "--tp 8 --pp-size 4", "--tp 8 --pp-size 4 --pp-size 1"),
        (ServerFacts(page_size=1), "--page-size 1", "--page-size 1 --page-size 16"),
        (ServerFacts(disable_radix_cache=True), "--disable-radix-cache --tp 8", "--tp 8"),
        (ServerFacts(kv_cache_dtype="mxfp8"), "--kv-cache-dtype mxfp8 --tp 8", "--tp 8 --kv-cache-dtype auto"),
        (ServerFacts(enable_hierarchical_cache=True), "--enable-hierarchical-cache --tp 8", "--tp 8"),
        (
            ServerFacts(draft=DraftFacts(algorithm="DFLASH")),
            "--speculative-algorithm DFLASH --tp 8",
            "--tp 8",
        ),
        (
            ServerFacts(
                disaggregation_mode="decode",
                disaggregation_decode_retraction_backup="host_pool",
                disaggregation_transfer_backend="nixl",
            ),
            "--disaggregation-decode-retraction-backup host_pool --tp 8",
            "--tp 8",
        ),
    ],
)
def test_way_out_when_a_refusal_names_it_then_the_line_becomes_what_it_says(facts, words, expected):
    assert applied(words.split(), refusals(facts)) == tuple(expected.split())


@pytest.mark.parametrize(
    ("facts", "words"), [({"dcp_size": 2}, "--dcp-size 2"), ({"enable_mis": True}, "--enable-mis")]
)
def test_way_out_when_the_flag_may_go_or_sharing_then_the_first_is_taken(facts, words):
    assert applied(["--tp", "8", *words.split()], mode_refusals(ModeFacts(**facts))) == ("--tp", "8")


def test_way_out_when_it_is_to_share_nothing_then_that_is_the_end_of_the_line():
    changed = applied(["--tp", "8"], ["this model (M) is odd: use --banyan-share off"])
    assert changed == ("--tp", "8", "--banyan-share", "off")
    assert applied(changed, [PP]) == ("--tp", "8", "--pp-size", "1", "--banyan-share", "off")


def test_way_out_when_a_reason_is_sglangs_own_then_nothing_is_changed():
    assert applied(["--tp", "8"], ["ValueError: no such model"]) == ("--tp", "8")


def test_ways_out_when_one_leads_to_another_then_both_are_taken_and_where_none_is_named_it_ends():
    asked = []

    def judge(lines):
        asked.append([line.arguments for line in lines])
        return [
            (line, Verdict("off" in line.arguments, reasons=("this model is odd: use --banyan-share off",)))
            for line in lines
        ]

    silent = Line(name="b", family="Llama", model=Path("m"), arguments=("--x",))
    found = [(LINE, Verdict(False, reasons=(PP,))), (silent, Verdict(False, reasons=("ValueError: x",)))]
    ended = {line.name: outcome(line, verdict) for line, verdict in tried(found, judge)}
    assert ended == {"a": "starts, shares nothing", "b": "refused again"}
    assert asked[0] == [(*LINE.arguments, "--pp-size", "1")]


@pytest.mark.parametrize(
    ("verdict", "words"),
    [(Verdict(True), "shared"), (Verdict(False, True), "crashes"), (Verdict(False), "refused again")],
)
def test_outcome_when_a_way_out_was_taken_then_it_is_said_in_words(verdict, words):
    assert outcome(LINE, verdict) == words
