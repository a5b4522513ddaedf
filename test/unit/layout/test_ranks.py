# SPDX-License-Identifier: Apache-2.0
"""Layouts and member slots: nobody sits in two places, and every part of the KV has one keeper in each rank."""

import pickle

import pytest

from banyan.core import SourceKind
from banyan.layout import Layout, MemberSlots

REPLICAS = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=2)
ATTENTION = Layout(dp=1, attn_dp=2, attn_cp=2, attn_tp=2)
FOUR = Layout(dp=4, attn_dp=1, attn_cp=1, attn_tp=1)
RANKS_ON_NODES = Layout(dp=1, attn_dp=8, attn_cp=1, attn_tp=2, num_nodes=2, node=1)
"""Ranks 4 to 7 are on the second node."""
RANK_OVER_NODES = Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=16, num_nodes=2, node=1)
"""Shards 8 to 15 are on the second node."""
TWO_OVER_FOUR = Layout(dp=1, attn_dp=2, attn_cp=1, attn_tp=8, num_nodes=4, node=3)
LAYOUTS = [
    *(REPLICAS, ATTENTION, FOUR, Layout(dp=1, attn_dp=8, attn_cp=1, attn_tp=1)),
    *(RANKS_ON_NODES, RANK_OVER_NODES, TWO_OVER_FOUR),
]


def everybody(layout, *, is_replicated=False):
    """All of one node."""
    processes = range(layout.first_process, layout.first_process + layout.num_member_slots)
    return [MemberSlots(layout, *divmod(process, layout.num_shards), is_replicated) for process in processes]


def test_flags_when_dp_attention_is_spelt_the_old_way_then_the_layout_is_that_of_the_new_spelling():
    new = Layout.of_flags(tp_size=8, attn_dp_size=4)
    assert Layout.of_flags(tp_size=8, dp_size=4, enable_dp_attention=True) == new
    assert (new.num_ranks, new.num_shards, new.num_member_slots, new.steps_together) == (4, 2, 8, True)


def test_flags_when_ranks_are_replicas_then_each_has_the_whole_tp_group():
    layout = Layout.of_flags(tp_size=2, dp_size=4)
    assert (layout.num_ranks, layout.num_shards, layout.num_member_slots, layout.steps_together) == (4, 2, 8, False)
    assert layout.num_slots(has_arena=False) == 8 and layout.num_slots(has_arena=True) == 16


def test_flags_when_the_tp_group_does_not_divide_then_they_are_refused_by_name():
    with pytest.raises(ValueError, match="--tp-size 6 does not divide into 4 attention DP ranks"):
        Layout.of_flags(tp_size=6, attn_dp_size=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_replicated", [False, True])
def test_member_slots_when_all_processes_take_theirs_then_no_slot_is_taken_twice(layout, is_replicated):
    member_slots = everybody(layout, is_replicated=is_replicated)
    slots = [member_slot.own for member_slot in member_slots] + [member_slot.own_arena for member_slot in member_slots]
    assert sorted(slots) == list(range(layout.num_slots(has_arena=True)))
    for member_slot in member_slots:
        assert member_slot.rank_of(member_slot.own) == member_slot.rank_of(member_slot.own_arena) == member_slot.dp_rank
        assert (member_slot.kind_of(member_slot.own), member_slot.kind_of(member_slot.own_arena)) == (
            SourceKind.PEER,
            SourceKind.HOST,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_replicated", [False, True])
def test_arena_when_it_is_divided_then_every_part_has_one_keeper_and_every_shard_reads_its_kv(layout, is_replicated):
    member_slots = everybody(layout, is_replicated=is_replicated)
    keepers = [member_slot for member_slot in member_slots if member_slot.is_keeper]
    assert sorted(member_slot.part for member_slot in keepers) == list(range(keepers[0].num_parts))
    of_slot = {member_slot.own_arena: member_slot for member_slot in keepers}
    for member_slot in member_slots:
        readable = [of_slot[slot] for slot in member_slot.arenas]
        assert readable[0].dp_rank == member_slot.dp_rank and len(readable) == len(layout.ranks_here)
        assert is_replicated or {one.shard for one in readable} == {member_slot.shard}


def test_peers_when_ranks_have_shards_then_each_shard_asks_its_own_kind_in_the_other_ranks():
    shards = everybody(ATTENTION)
    assert [member_slot.peers for member_slot in shards] == [[4], [5], [6], [7], [0], [1], [2], [3]]
    four = everybody(FOUR)
    assert four[1].peers == [2, 3, 0]


def test_peers_when_ranks_lie_on_other_nodes_too_then_only_those_of_the_node_are_asked():
    shards = everybody(RANKS_ON_NODES)
    assert [(one.dp_rank, one.own) for one in shards] == [(number // 2 + 4, number) for number in range(8)]
    assert shards[2].peers == [4, 6, 0] and [shards[2].rank_of(slot) for slot in shards[2].peers] == [6, 7, 4]
    assert shards[3].with_peers == [1, 3, 5, 7]
    assert [one.is_of_first_rank for one in shards] == [True, True, *[False] * 6]
    assert RANKS_ON_NODES.first_member_slots == {4: 0, 5: 2, 6: 4, 7: 6}


def test_member_slots_when_a_rank_lies_on_several_nodes_then_each_node_has_its_shards_and_a_keeper():
    shards = everybody(RANK_OVER_NODES, is_replicated=True)
    assert [(one.shard, one.own) for one in shards] == [(number + 8, number) for number in range(8)]
    assert [one.is_keeper for one in shards] == [True, *[False] * 7]
    assert all(one.peers == [] and one.arenas == [8] and one.num_parts == 1 for one in shards)
    assert RANK_OVER_NODES.first_member_slots == {0: 0}
    assert TWO_OVER_FOUR.ranks_here == range(1, 2) and everybody(TWO_OVER_FOUR)[0].shard == 4


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"tp_size": 8, "attn_dp_size": 2, "num_nodes": 3}, "--nnodes 3: 2 attention DP ranks of 4"),
        ({"tp_size": 12, "attn_dp_size": 3, "num_nodes": 2}, "--nnodes 2: 3 attention DP ranks of 4"),
        ({"tp_size": 2, "dp_size": 2, "num_nodes": 2}, "--dp 2 with --nnodes 2.*--enable-dp-attention"),
        ({"tp_size": 2, "num_nodes": 2, "node": 2}, "--node-rank 2 is none of --nnodes 2"),
    ],
)
def test_flags_when_processes_do_not_divide_over_nodes_then_they_are_refused_by_name(sizes, line):
    with pytest.raises(ValueError, match=line):
        Layout.of_flags(**sizes)


def test_member_slot_when_a_process_is_on_another_node_then_it_is_refused():
    with pytest.raises(ValueError, match="rank 0, shard 0 is not among those of node 1"):
        MemberSlots(RANKS_ON_NODES, 0, 0)


def test_shard_when_the_tp_group_holds_all_ranks_then_it_is_counted_within_the_rank():
    assert [ATTENTION.shard_of(tp_rank) for tp_rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("layout", [REPLICAS, Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=2)])
def test_windows_when_a_process_has_member_slots_for_them_then_they_lie_behind_all_others_and_divide_alike(layout):
    firsts = everybody(layout)
    behind = [member_slots.of_windows() for member_slots in firsts]
    taken = [slot for member_slots in (*firsts, *behind) for slot in (member_slots.own, member_slots.own_arena)]
    assert sorted(taken) == list(range(layout.num_slots_with_windows))
    for one, other in zip(firsts, behind, strict=True):
        offset = layout.first_window_slot
        assert other.peers == [slot + offset for slot in one.peers]
        assert other.arenas == [slot + offset for slot in one.arenas]
        assert (other.part, other.num_parts) == (one.part, one.num_parts)
        for slot in (*one.peers, *one.arenas):
            assert other.kind_of(slot + offset) is one.kind_of(slot)
            assert other.rank_of(slot + offset) == one.rank_of(slot)


def test_member_slot_when_a_process_is_outside_the_layout_then_it_is_refused():
    with pytest.raises(ValueError, match="rank 2, shard 0 is not among 2 ranks"):
        MemberSlots(REPLICAS, 2, 0)


def test_layout_when_it_travels_to_another_process_then_it_arrives_unchanged():
    assert pickle.loads(pickle.dumps(ATTENTION)) == ATTENTION
