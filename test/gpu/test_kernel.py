# SPDX-License-Identifier: Apache-2.0
"""``kv_trans_for_dp`` on the device against the reference: every byte of every place, poison included."""

import pytest
import torch
from test.kernels.kv_pools import GEOMETRIES, arena, launch, pool
from test.kernels.reference import kv_trans_reference

from banyan.transport.kv_trans.launch import on_torch_stream
from banyan_lab.bench.gpu_pools import model_shapes

SHAPES = {
    **{name: tuple(sizes) for name, sizes in GEOMETRIES.items()},
    **{shape.name: shape.page_bytes * 3 for tokens in (16, 64) for shape in model_shapes(tokens)},
}


def check(places, page_bytes, lists, *, target_row=0, groups=None, num_programs=16):
    groups = groups or [range(len(page_bytes))]
    expected = [[extent.clone() for extent in place] for place in places]
    for extents in groups:
        kv_trans_reference(
            expected, rows=lists[0], sources=lists[1], targets=lists[2], target_row=target_row, extents=extents
        )
    launch(
        None,
        places,
        page_bytes,
        lists,
        target_row=target_row,
        groups=groups,
        num_programs=num_programs,
        tile_bytes=32768,
        on_stream=on_torch_stream,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    for mine, theirs in zip(places, expected, strict=True):
        for extent, other in zip(mine, theirs, strict=True):
            assert torch.equal(extent, other)


@pytest.mark.parametrize("page_bytes", SHAPES.values(), ids=SHAPES.keys())
def test_fetch_when_pages_come_from_two_peers_then_exactly_they_are_written(page_bytes):
    places = [
        pool(page_bytes, 40, device="cuda"),
        pool(page_bytes, 40, device="cuda", seed=1),
        pool(page_bytes, 50, device="cuda", seed=2),
    ]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [1 + number % 2 for number in range(33)]
    check(places, page_bytes, (rows, order[:33], order[7:]))


@pytest.mark.parametrize("num_programs", [1, 7, 500])
def test_fetch_when_layers_go_in_groups_over_any_grid_then_equal(num_programs):
    page_bytes = (4096, 2048) * 4
    places = [pool(page_bytes, 64, device="cuda"), pool(page_bytes, 64, device="cuda", seed=1)]
    lists = ([1] * 64, list(range(64)), list(range(63, -1, -1)))
    check(places, page_bytes, lists, groups=[range(0, 2), range(2, 6), range(6, 8)], num_programs=num_programs)


def test_arena_when_pages_go_down_and_up_then_equal():
    page_bytes = (4096, 4096) * 4
    blocks = torch.cat(pool(page_bytes, 32, seed=3), dim=1).pin_memory()
    up = [pool(page_bytes, 32, device="cuda"), list(blocks.split(list(page_bytes), dim=1))]
    for target_row, rows in ((0, [1] * 32), (1, [0] * 32)):
        expected = [[extent.cpu().clone() for extent in place] for place in up]
        lists = (rows, list(range(32)), list(range(31, -1, -1)))
        kv_trans_reference(
            expected,
            rows=rows,
            sources=lists[1],
            targets=lists[2],
            target_row=target_row,
            extents=range(len(page_bytes)),
        )
        launch(
            None,
            up,
            page_bytes,
            lists,
            target_row=target_row,
            groups=[range(len(page_bytes))],
            num_programs=16,
            tile_bytes=32768,
            on_stream=on_torch_stream,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        torch.cuda.synchronize()
        for mine, theirs in zip(up[target_row], expected[target_row], strict=True):
            assert torch.equal(mine.cpu(), theirs)


def test_arena_helper_when_made_on_the_device_then_strides_are_those_of_blocks():
    page_bytes = (64, 128)
    assert {extent.stride(0) for extent in arena(page_bytes, 3, device="cuda", seed=0)} == {192}
