# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.layout import PageLayout, PoolGeometry
from banyan.layout.geometry import ALIGNMENT_BYTES
from banyan.layout.page import Part


def page(*layers):
    """A page of layers that differ."""
    return PageLayout(tuple(tuple(Part(f"part {i}", size) for i, size in enumerate(sizes)) for sizes in layers))


def test_stacked_when_k_and_v_differ_in_size_then_v_follows_k_and_layers_are_aligned():
    geometry = PoolGeometry.stacked(page([100, 40], [100, 40]), 3)
    assert geometry.table() == [[(0, 100), (300, 40)], [(4096, 100), (4396, 40)]]
    assert geometry.num_bytes == 4396 + 3 * 40


def test_stacked_when_there_are_no_pages_then_it_is_refused():
    with pytest.raises(ValueError, match="no pool of"):
        PoolGeometry.stacked(page([4]), 0)


@given(
    layers=st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=3), min_size=1, max_size=9),
    num_pages=st.integers(1, 50),
)
def test_stacked_when_any_pool_then_no_two_extents_overlap(layers, num_pages):
    geometry = PoolGeometry.stacked(page(*layers), num_pages)
    extents = [extent for layer in geometry.layers for extent in layer]
    assert all(before.end_bytes <= after.base_bytes for before, after in pairwise(extents))
    assert all(layer[0].base_bytes % ALIGNMENT_BYTES == 0 for layer in geometry.layers)
    assert geometry.num_bytes == extents[-1].end_bytes
