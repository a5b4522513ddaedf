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
    ("fetched_ms", "requests_per_s", "gap_ms", "broken"),
    [
        (40, 99, 10.1, []),
        (410, 99, 10.1, ["prompts_are_there_sooner_than_computed"]),
        (40, 90, 10.1, ["as_many_requests_where_nothing_is_shared"]),
        (40, 99, 11.0, ["tokens_come_as_fast_where_nothing_is_shared"]),
    ],
)
def test_verdict_when_a_figure_speaks_against_sharing_then_that_condition_does_not_hold(
    figures, fetched_ms, requests_per_s, gap_ms, broken
):
    alone = found(requests_per_s={"peer": requests_per_s, "off": 100}, itl_p50_ms={"peer": gap_ms, "off": 10})
    first = [found(other_rank_ms={"peer": 30, "off": 400}), found(other_rank_ms={"peer": fetched_ms, "off": 400})]
    assert [name for name, holds in figures.verdict(alone, first).items() if not holds] == broken
