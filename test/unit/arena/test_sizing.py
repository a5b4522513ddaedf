# SPDX-License-Identifier: Apache-2.0
from banyan.arena.sizing import COMMITTED_POOLS, GROWING_POOLS, auto_size
from banyan.config import GIB


def test_size_when_memory_is_plenty_then_the_pools_decide():
    size = auto_size(pool_bytes=GIB, num_parts=2, free_bytes=100 * GIB, num_pools=GROWING_POOLS)
    assert size.part_bytes == GROWING_POOLS * GIB
    assert (
        auto_size(pool_bytes=GIB, num_parts=2, free_bytes=100 * GIB, num_pools=COMMITTED_POOLS).part_bytes
        == COMMITTED_POOLS * GIB
    )


def test_size_when_memory_is_short_then_all_parts_together_take_a_quarter_and_leave_one():
    size = auto_size(pool_bytes=50 * GIB, num_parts=8, free_bytes=64 * GIB, num_pools=GROWING_POOLS)
    assert size.part_bytes * 8 == 16 * GIB
    assert size.reserve_bytes == 16 * GIB


def test_size_when_nothing_is_free_then_nothing():
    assert auto_size(pool_bytes=GIB, num_parts=2, free_bytes=0, num_pools=GROWING_POOLS).part_bytes == 0


def test_line_when_said_then_it_has_the_size_and_the_way_out():
    line = auto_size(pool_bytes=GIB, num_parts=2, free_bytes=100 * GIB, num_pools=GROWING_POOLS).line()
    assert "8.00 GiB" in line and "--banyan-host-gb" in line and "\n" not in line
