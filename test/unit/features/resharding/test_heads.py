# SPDX-License-Identifier: Apache-2.0
"""Every head is taken from a shard that has it and goes where it belongs, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test.unit.layout.test_namespace import ONE

from banyan.features.resharding.heads import heads_of, pieces, rows_of, sizes


@given(st.data())
def test_heads_when_put_together_from_shards_of_another_size_then_each_is_in_its_place_and_taken_once(data):
    num_heads = data.draw(st.integers(1, 24))
    possible = sizes(num_heads, 48)
    own_size, size = data.draw(st.sampled_from(possible)), data.draw(st.sampled_from(possible))
    own = heads_of(num_heads, own_size, data.draw(st.integers(0, own_size - 1)))
    row: list = [None] * len(own)
    for piece in pieces(num_heads, own, size):
        theirs = list(heads_of(num_heads, size, piece.shard))
        assert len(theirs) == piece.num_theirs
        assert row[piece.here] == [None] * (piece.here.stop - piece.here.start)
        row[piece.here] = theirs[piece.there]
    assert row == list(own)


@pytest.mark.parametrize("num_heads", range(1, 13))
def test_heads_when_divided_then_each_is_somebodys_and_shards_that_share_one_are_neighbours(num_heads):
    for size in sizes(num_heads, 24):
        held = [list(heads_of(num_heads, size, shard)) for shard in range(size)]
        # As SGLang's layers divide them: linear.QKVParallelLinear.
        each, replicas = max(1, num_heads // size), max(1, size // num_heads)
        assert held == [list(range(shard // replicas * each, shard // replicas * each + each)) for shard in range(size)]


def test_sizes_when_listed_then_those_that_heads_can_be_divided_over():
    assert sizes(8, 64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes(6, 6) == [1, 2, 3, 6]
    assert sizes(1, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        ({}, 16),
        ({"pool_layout": "SharedMHAPool/hnd"}, 1),
        ({"pool_layout": "SharedMHAPool/vectorized_5d"}, 0),
        ({"page": ((("latents", 512),),)}, 0),
        ({"page": ((("keys", 512), ("values", 512), ("index keys", 64)),)}, 0),
        ({"page": ((("keys", 512), ("values", 512)), (("keys", 256), ("values", 256)))}, 0),
        ({"draft": ("EAGLE", "a-draft")}, 0),
        ({"window": ("full", "40 tokens", "wf")}, 0),
        ({"attn_cp_size": 2}, 0),
    ],
)
def test_page_when_it_is_more_than_keys_and_values_of_heads_then_it_has_no_rows(other, rows):
    assert rows_of(replace(ONE, **other)) == rows
