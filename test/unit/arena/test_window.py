# SPDX-License-Identifier: Apache-2.0
"""What may be on its way at once follows from the link, within a share of the arena."""

import pytest

from banyan.arena.window import window_bytes

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("link_bytes_per_s", "arena_bytes", "expected"),
    [
        (0.0, 64 * GIB, 256 * MIB),
        (25e9, 64 * GIB, 2_500_000_000),
        (25e9, 4 * GIB, GIB),
        (25e9, 64 * MIB, 256 * MIB),
    ],
    ids=["nobody has measured", "a fast link", "a small arena", "an arena below the least"],
)
def test_window_when_the_link_is_that_fast_then_so_much_is_on_its_way(link_bytes_per_s, arena_bytes, expected):
    assert window_bytes(256 * MIB, link_bytes_per_s=link_bytes_per_s, arena_bytes=arena_bytes) == expected
