# SPDX-License-Identifier: Apache-2.0
"""A rank that is not where its server's rank table has it, or has other pages than its peers, does not start."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.test_linker import LAYOUT, PAGE, make_rank

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin import seams
from banyan.sglang_plugin.rank import own_slots
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


@pytest.fixture
def start_together(monkeypatch):
    """What each process of a TP group takes the server's name for, or the line with which it is refused; given what is
    off in each. They gather twice: first what each has to tell."""

    def run(*off):
        group = SimpleNamespace(world_size=len(off), cpu_group="cpu")
        monkeypatch.setattr(own_slots, "get_tp_group", lambda: group)
        sent = []

        def process(number):
            monkeypatch.setattr(seams, "off", lambda process: off[number])
            args = SimpleNamespace(_banyan={"server": f"{number:032x}"})
            try:
                own_slots.agree_on_server(args)
            except (SystemExit, Refused):
                return "refused"
            return int(args._banyan["server"], 16)

        def tell(told, mine, group):
            sent.append(mine)
            for one in told:
                one.copy_(mine)

        def gather(told, mine, group):
            assert group == "cpu"
            for one, other in zip(told, sent, strict=True):
                one.copy_(other)

        monkeypatch.setattr(torch.distributed, "all_gather", tell)
        assert [process(number) for number in range(len(off))] == list(range(len(off)))
        monkeypatch.setattr(torch.distributed, "all_gather", gather)
        return [process(number) for number in range(len(off))]

    return run


def test_processes_when_the_same_is_off_in_all_then_they_have_the_name_of_the_first_ones_server(start_together):
    assert start_together([], []) == [0, 0]
    assert start_together(["34-memory", "told"], ["34-memory", "told"]) == [0, 0]


def test_processes_when_a_feature_is_off_in_one_then_none_starts_for_the_others_would_wait_for_it(
    start_together, capsys
):
    assert start_together([], ["34-memory"], []) == ["refused"] * 3
    lines = capsys.readouterr().err.splitlines()
    assert ["none" in line for line in lines] == [True, False, True] and "34-memory in this one" in lines[1]
