# SPDX-License-Identifier: Apache-2.0
"""The shards of one rank agree over both groups in which SGLang intersects; a whole rank asks nobody."""

from types import SimpleNamespace

import pytest
import torch

from banyan.sglang_plugin.rank.shards import Shards

SIZES = {"cp": 2, "tp": 4, "alone": 1}


@pytest.fixture
def reduced(monkeypatch):
    """Groups that were reduced over; in those called by name in ``refusing`` another shard was refused."""
    seen = SimpleNamespace(groups=[], refusing=set())

    def all_reduce(verdict, op, group):
        seen.groups.append(group)
        if group in seen.refusing:
            verdict.zero_()

    monkeypatch.setattr(torch.distributed, "get_world_size", SIZES.get)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return seen


def shards(cp, tp):
    return Shards(SimpleNamespace(attn_cp_cache_group=cp, attn_tp_cache_group=tp))


def test_all_when_the_process_is_the_whole_rank_then_nobody_is_asked(reduced):
    for one in (shards(None, None), shards("alone", "alone")):
        assert one.is_one and one.all(True) and not one.all(False)
    assert reduced.groups == []


@pytest.mark.parametrize("refusing", ["cp", "tp"])
def test_all_when_a_shard_of_either_group_is_refused_then_none_goes_on(reduced, refusing):
    both = shards("cp", "tp")
    assert not both.is_one and both.all(True)
    reduced.refusing.add(refusing)
    reduced.groups.clear()
    assert not both.all(True)
    assert reduced.groups == ["cp", "tp"], "every shard reduces over both, or the others wait for it"


def test_all_when_only_tp_divides_the_rank_then_only_that_group_is_asked(reduced):
    assert shards("alone", "tp").all(True)
    assert reduced.groups == ["tp"]
