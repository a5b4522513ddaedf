# SPDX-License-Identifier: Apache-2.0
"""What may be on its way at once: down as the link goes, up as long prompts need it, both within a share of the
arena."""

import pytest

from banyan.arena.window import backup_limit_bytes, layers_per_read, read_limit_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TOKEN_BYTES = 128 << 10
"""KV of an 8B model."""


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
def test_backups_when_the_link_is_that_fast_then_so_much_is_on_its_way(link_bytes_per_s, arena_bytes, expected):
    assert backup_limit_bytes(link_bytes_per_s=link_bytes_per_s, arena_bytes=arena_bytes) == expected


def test_reads_when_the_arena_is_as_large_as_is_usual_then_a_prompt_of_128k_tokens_is_read_whole():
    assert read_limit_bytes(arena_bytes=32 * GIB) >= 128 * 1024 * TOKEN_BYTES


def test_reads_when_the_arena_is_small_then_all_of_it_is_lent():
    assert read_limit_bytes(arena_bytes=GIB // 2) >= GIB // 2


@pytest.mark.parametrize(
    ("layer_bytes", "num_layers"),
    [
        ([12 * KIB] * 30, 11),
        ([64 * KIB] * 32, 2),
        ([256 * KIB] * 80, 1),
        ([4 * KIB] * 8, 8),
        ([160 * KIB] + [32 * KIB] * 3, 2),
    ],
    ids=["small layers", "8B", "70B", "a page below the step", "uneven layers"],
)
def test_step_when_nobody_chose_then_the_fewest_layers_that_keep_a_drive_busy(layer_bytes, num_layers):
    assert layers_per_read(None, layer_bytes) == num_layers


@pytest.mark.parametrize(("wished", "num_layers"), [(1, 1), (7, 7), (99, 30), (0, 30)])
def test_step_when_chosen_then_so_and_never_more_than_a_page(wished, num_layers):
    assert layers_per_read(wished, [12 * KIB] * 30) == num_layers
