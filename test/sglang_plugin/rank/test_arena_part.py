# SPDX-License-Identifier: Apache-2.0
"""Where the memory of a part comes from, by who else is going to know it."""

from types import SimpleNamespace

import pytest

from banyan.arena.sizing import COMMITTED_POOLS, GROWING_POOLS
from banyan.config import Config
from banyan.layout import BlockGeometry, Layout, MemberSlots
from banyan.sglang_plugin.rank.arena_part import open_part

BLOCK = BlockGeometry(((2048, 2048),) * 2)
POOL_BYTES = 32 * BLOCK.frame_bytes
LAYOUT = Layout(dp=1, attn_dp=1, attn_cp=1, attn_tp=1)


@pytest.mark.parametrize(
    ("flags", "num_pools"),
    [
        ({"listen": "127.0.0.1:7400", "carrier": "nixl"}, COMMITTED_POOLS),
        ({"peers": ("127.0.0.1:7400",), "carrier": "nixl"}, COMMITTED_POOLS),
        ({"listen": "127.0.0.1:7400"}, GROWING_POOLS),
        ({"carrier": "nixl"}, GROWING_POOLS),
    ],
)
def test_part_when_nixl_is_going_to_register_it_then_all_of_it_has_memory_from_the_start(flags, num_pools):
    kind = SimpleNamespace(
        config=Config(secret_file="secret", **flags),
        member_slots=MemberSlots(LAYOUT, 0, 0),
        block=BLOCK,
        pools=SimpleNamespace(share=1.0),
        is_on_host=True,
    )
    arena = open_part(kind, POOL_BYTES)
    assert arena.memory.num_bytes == num_pools * POOL_BYTES
    assert (arena.growth is None) == (num_pools == COMMITTED_POOLS)
