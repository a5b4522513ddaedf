# SPDX-License-Identifier: Apache-2.0
"""What the figures of an 8B shape are judged by."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def figures(monkeypatch):
    """The script, which finds what lies beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    return importlib.import_module("figures")


def found(**names):
    return {share: {name: [values[share]] * 3 for name, values in names.items()} for share in ("peer", "off")}


@pytest.mark.parametrize(
    ("fetched_ms", "requests_per_s", "gap_ms", "longest_ms", "broken"),
    [
        (40, 99, 10.1, 60, []),
        (410, 99, 10.1, 60, ["prompts_are_there_sooner_than_computed"]),
        (40, 90, 10.1, 60, ["as_many_requests_where_nothing_is_shared"]),
        (40, 99, 11.0, 60, ["tokens_come_as_fast_where_nothing_is_shared"]),
        (40, 99, 10.1, 61, ["no_token_comes_much_later"]),
    ],
)
def test_verdict_when_a_figure_speaks_against_sharing_then_that_condition_does_not_hold(
    figures, fetched_ms, requests_per_s, gap_ms, longest_ms, broken
):
    alone = found(requests_per_s={"peer": requests_per_s, "off": 100}, itl_p50_ms={"peer": gap_ms, "off": 10})
    first = [found(other_rank_ms={"peer": 30, "off": 400}), found(other_rank_ms={"peer": fetched_ms, "off": 400})]
    longest = {"peer": 20, "off": 20}
    beside = found(alone_itl_max_ms=longest, beside_itl_max_ms=longest)
    beside["peer"]["alone_itl_max_ms"][1] = longest_ms
    assert [name for name, holds in figures.verdict(alone, first, beside).items() if not holds] == broken
