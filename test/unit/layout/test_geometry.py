# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.layout import PoolGeometry
from banyan.layout.geometry import ALIGNMENT_BYTES


def test_stacked_when_k_and_v_differ_in_size_then_v_follows_k_and_layers_are_aligned():
    geometry = PoolGeometry.stacked(num_layers=2, num_pages=3, page_bytes=[100, 40])
    assert geometry.table() == [[(0, 100), (300, 40)], [(4096, 100), (4396, 40)]]
    assert geometry.num_bytes == 4396 + 3 * 40
    assert geometry.full_block_bytes == 280


def test_shape_key_when_only_capacity_differs_then_pools_may_exchange_pages():
    small = PoolGeometry.stacked(num_layers=2, num_pages=3, page_bytes=[64, 64])
    large = PoolGeometry.stacked(num_layers=2, num_pages=300, page_bytes=[64, 64])
    other = PoolGeometry.stacked(num_layers=2, num_pages=3, page_bytes=[64, 32])
    assert small.shape_key() == large.shape_key() != other.shape_key()


@pytest.mark.parametrize("bad", [{"num_layers": 0}, {"num_pages": 0}, {"page_bytes": []}, {"page_bytes": [4, 0]}])
def test_stacked_when_a_size_is_not_positive_then_it_is_refused(bad):
    with pytest.raises(ValueError, match="no pool of"):
        PoolGeometry.stacked(**{"num_layers": 1, "num_pages": 1, "page_bytes": [4], **bad})


@given(
    num_layers=st.integers(1, 9),
    num_pages=st.integers(1, 50),
    page_bytes=st.lists(st.integers(1, 9000), min_size=1, max_size=3),
)
def test_stacked_when_any_pool_then_no_two_extents_overlap(num_layers, num_pages, page_bytes):
    geometry = PoolGeometry.stacked(num_layers=num_layers, num_pages=num_pages, page_bytes=page_bytes)
    extents = [extent for layer in geometry.layers for extent in layer]
    assert all(before.end_bytes <= after.base_bytes for before, after in pairwise(extents))
    assert all(layer[0].base_bytes % ALIGNMENT_BYTES == 0 for layer in geometry.layers)
    assert geometry.num_bytes == extents[-1].end_bytes
