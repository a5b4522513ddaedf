# SPDX-License-Identifier: Apache-2.0
"""``kv_trans_for_dp`` in Triton's interpreter against the reference: every byte of the target, poison included."""

from contextlib import nullcontext

import pytest
import torch
from test.kernels.kv_pools import GEOMETRIES, POISON, arena, fused, launch, place_table, pool
from test.kernels.reference import kv_trans_reference

from banyan.transport.kv_trans.launch import KvTrans, TileShape

NUM_PAGES = 5
TILE_BYTES = 4096


def check(kernel, places, page_bytes, lists, *, target_row=0, groups=None, num_programs=3, tile_bytes=TILE_BYTES):
    groups = groups or [range(len(page_bytes))]
    expected = [[extent.clone() for extent in place] for place in places]
    for extents in groups:
        rows, sources, targets = lists
        kv_trans_reference(
            expected, rows=rows, sources=sources, targets=targets, target_row=target_row, extents=extents
        )
    launch(
        kernel,
        places,
        page_bytes,
        lists,
        target_row=target_row,
        groups=groups,
        num_programs=num_programs,
        tile_bytes=tile_bytes,
    )
    for mine, theirs in zip(places, expected, strict=True):
        for extent, other in zip(mine, theirs, strict=True):
            assert torch.equal(extent, other)


@pytest.mark.parametrize("page_bytes", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_fetch_when_pages_come_from_two_peers_then_exactly_they_are_written(interpreted_kernel, page_bytes):
    places = [
        pool(page_bytes, NUM_PAGES),
        pool(page_bytes, NUM_PAGES, seed=1),
        pool(page_bytes, NUM_PAGES + 2, seed=2),
    ]
    check(interpreted_kernel, places, page_bytes, ([1, 2, 1], [4, 6, 0], [2, 0, 4]))


def test_fetch_when_k_and_v_are_halves_of_one_tensor_then_equal(interpreted_kernel):
    page_bytes = [128, 128] * 2
    places = [fused(page_bytes, NUM_PAGES, seed=seed) for seed in (0, 1)]
    check(interpreted_kernel, places, page_bytes, ([1, 1], [3, 1], [0, 4]))


@pytest.mark.parametrize("groups", [[range(0, 2)], [range(2, 6)], [range(0, 2), range(2, 4), range(4, 6)]])
def test_fetch_when_layers_are_launched_in_groups_then_only_their_extents_are_written(interpreted_kernel, groups):
    page_bytes = [64, 32] * 3
    places = [pool(page_bytes, NUM_PAGES), pool(page_bytes, NUM_PAGES, seed=1)]
    check(interpreted_kernel, places, page_bytes, ([1, 1], [1, 2], [3, 0]), groups=groups)


@pytest.mark.parametrize("num_programs", [1, 2, 64])
def test_fetch_when_the_grid_is_bounded_then_all_pages_are_copied(interpreted_kernel, num_programs):
    page_bytes = [1024] * 4
    places = [pool(page_bytes, 16), pool(page_bytes, 16, seed=1)]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
    check(interpreted_kernel, places, page_bytes, ([1] * 16, order, order[::-1]), num_programs=num_programs)


def test_load_and_backup_when_the_other_place_is_an_arena_then_full_blocks_are_read_and_written(interpreted_kernel):
    page_bytes = [96, 96, 96, 96]
    places = [pool(page_bytes, NUM_PAGES, seed=0), arena(page_bytes, 3, seed=1)]
    check(interpreted_kernel, places, page_bytes, ([1, 1], [2, 0], [4, 1]), target_row=0)
    check(interpreted_kernel, places, page_bytes, ([0, 0], [3, 2], [0, 1]), target_row=1)


def test_fetch_when_there_are_no_pages_then_nothing_is_written(interpreted_kernel):
    page_bytes = [64] * 2
    places = [pool(page_bytes, NUM_PAGES), pool(page_bytes, NUM_PAGES, seed=1)]
    check(interpreted_kernel, places, page_bytes, ([], [], []))


def test_warm_up_when_called_then_nothing_is_written(interpreted_kernel):
    (extent,) = places = pool([64], NUM_PAGES)
    table = place_table([places])
    shape = TileShape.fitting([64], 16, TILE_BYTES)
    chunks = torch.tensor(shape.chunks([64]), dtype=torch.int32)
    KvTrans(
        table=table.data_ptr(),
        chunks=chunks.data_ptr(),
        page_bytes=[64],
        shape=shape,
        num_programs=2,
        on_stream=lambda _stream: nullcontext(),
        kernel=interpreted_kernel,
    ).warm_up(stream=0)
    assert (extent == POISON).all()
