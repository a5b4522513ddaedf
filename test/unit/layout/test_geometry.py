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


def test_geometry_when_drafts_follow_then_every_extent_stays_where_it_is():
    front = PoolGeometry.stacked(page([100, 40], [100, 40]), 3)
    first = PoolGeometry.stacked(page([8]), 3, base_bytes=front.num_bytes)
    second = PoolGeometry.stacked(page([16], [4]), 4, base_bytes=first.num_bytes)
    whole = front.followed_by([first, second])
    assert whole.table() == [*front.table(), *first.table(), *second.table()]
    assert first.table() == [[(8192, 8)]] and second.layers[0][0].base_bytes == 12288
    assert (whole.num_pages, whole.num_bytes) == (3, second.num_bytes)
    assert whole.page == front.page.followed_by([first.page, second.page])


def test_geometry_when_a_draft_has_fewer_pages_or_lies_in_the_model_then_it_is_refused():
    front = PoolGeometry.stacked(page([100]), 3)
    for draft in (PoolGeometry.stacked(page([8]), 2, base_bytes=front.num_bytes), PoolGeometry.stacked(page([8]), 3)):
        with pytest.raises(ValueError, match="does not lie behind 3 pages"):
            front.followed_by([draft])


def test_by_part_when_layers_are_alike_then_each_part_of_all_of_them_is_one_run_of_bytes():
    geometry = PoolGeometry.by_part(page([100, 40], [100, 40]), 3)
    assert geometry.table() == [[(0, 100), (4096, 40)], [(300, 100), (4216, 40)]]
    assert geometry.num_bytes == 4096 + 2 * 3 * 40 and geometry.num_pages == 3


@pytest.mark.parametrize("layers, num_pages", [(([4], [4]), 0), (([4], [5]), 3)])
def test_by_part_when_layers_differ_or_there_are_no_pages_then_it_is_refused(layers, num_pages):
    with pytest.raises(ValueError, match="no pool of"):
        PoolGeometry.by_part(page(*layers), num_pages)
