# SPDX-License-Identifier: Apache-2.0
"""The layout that Banyan computes from raw flags, against the one that SGLang's own resolution computes."""

import types

import pytest
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.arg_groups.parallel_hook import handle_deprecated_dp_attention, handle_dwdp
from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
from sglang.srt.runtime_context import attn_tp_size_of, num_dp_ranks_of
from sglang.srt.server_args import ServerArgs

from banyan.layout import Layout, MemberSlots
from banyan.sglang_plugin.launcher.flags import layout_of

FLAGS = [
    {},
    {"tp_size": 2},
    {"dp_size": 4},
    {"tp_size": 2, "dp_size": 2},
    {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    {"tp_size": 2, "attn_dp_size": 2},
    {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True},
    {"tp_size": 8, "attn_dp_size": 8},
    {"tp_size": 8, "attn_dp_size": 2, "attn_cp_size": 2},
    {"tp_size": 4, "attn_cp_size": 2},
    # A resolved record read back in: the old flag beside the new one.
    {"tp_size": 4, "attn_dp_size": 4, "enable_dp_attention": True},
    {"tp_size": 4, "dwdp_size": 4},
    {"tp_size": 4, "dp_size": 4, "dwdp_size": 4, "enable_dp_attention": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_layout_when_flags_are_raw_then_it_is_what_upstream_resolves(flags, monkeypatch):
    # DWDP's handler writes one; it is not to outlive the test.
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "0")
    args = ServerArgs(model_path="nowhere", **flags)
    layout = layout_of(args)
    handle_deprecated_dp_attention(args)
    handle_dwdp(args)
    resolved = resolved_view(args)
    assert layout.num_ranks == num_dp_ranks_of(resolved)
    assert layout == Layout(
        dp=resolved.dp_size,
        attn_dp=resolved.attn_dp_size,
        attn_cp=resolved.attn_cp_size,
        attn_tp=attn_tp_size_of(resolved),
    )


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags.get("dp_size", 1) == 1], ids=str)
def test_member_slots_when_upstream_numbers_a_tp_group_then_each_process_has_its_own(flags):
    layout = layout_of(types.SimpleNamespace(**{**RAW, **flags}))
    tp_size = layout.num_member_slots
    member_slots = []
    for tp_rank in range(tp_size):
        info = compute_dp_attention_world_info(tp_rank, tp_size, layout.attn_dp, layout.attn_cp)
        member_slots.append(MemberSlots(layout, info[2], layout.shard_of(tp_rank)).own)
    assert member_slots == list(range(tp_size))


RAW = {
    "tp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "enable_dp_attention": False,
    "dwdp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
}
