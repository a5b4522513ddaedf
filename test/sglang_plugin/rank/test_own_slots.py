# SPDX-License-Identifier: Apache-2.0
"""A rank that is not where its server's rank table has it, or has other pages than its peers, does not start."""

from dataclasses import replace

import pytest
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.test_linker import LAYOUT, PAGE, make_rank

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin.runtime import Refused


def refused_as(monkeypatch, capsys, rank_table):
    """The line of a rank that is not to start."""
    with pytest.raises((SystemExit, Refused)):
        make_rank(monkeypatch, rank_table, 0, Config(min_fetch_tokens=PAGE, host_gb=0.0))
    return capsys.readouterr().err


def test_rank_when_sglang_has_resolved_another_layout_than_the_table_was_made_for_then_refused(monkeypatch, capsys):
    asked = replace(LAYOUT, dp=4)
    monkeypatch.setattr(rig, "LAYOUT", asked)
    line = refused_as(monkeypatch, capsys, _native.RankTable.create(8))
    assert asked.words() in line and LAYOUT.words() in line


def test_rank_when_its_pages_have_another_size_than_its_peers_then_refused(monkeypatch, capsys):
    rank_table = _native.RankTable.create(4)
    rank_table.agree_on_page_tokens(2 * PAGE)
    line = refused_as(monkeypatch, capsys, rank_table)
    assert f"a page has {PAGE} tokens here and {2 * PAGE} tokens at another rank" in line
