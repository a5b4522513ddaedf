# SPDX-License-Identifier: Apache-2.0
"""Pools of several layouts on any device, filled with random bytes, and a launch of the kernel over them."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.kv_trans.launch import KvTrans, TileShape

POISON = 0xEE

GEOMETRIES = {
    "GQA, K and V apart, bf16": [2 * 4 * 8 * 2] * 4,
    "K and V of other widths": [256, 128] * 2,
    "MLA, 576 wide, bf16": [4 * 576 * 2] * 2,
    "fp8 with a scale for each token": [512, 16, 512, 16],
    "pages larger than a tile": [3 * 4096 + 32] * 2,
    "aligned to 4 bytes": [12, 20],
    "odd bytes": [13, 7],
}


def pool(page_bytes, num_pages, *, device="cpu", seed=None):
    """One uint8 tensor ``[num_pages, page_bytes]`` for each extent; poisoned without a seed."""
    if seed is None:
        return [torch.full((num_pages, size), POISON, dtype=torch.uint8, device=device) for size in page_bytes]
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 256, (num_pages, size), dtype=torch.uint8, generator=generator) for size in page_bytes]
    return [extent.to(device) for extent in made]


def arena(page_bytes, num_frames, *, device="cpu", seed):
    """Full Blocks: the extents of a page are adjacent, so the pages of an extent are not."""
    block = torch.cat(pool(page_bytes, num_frames, seed=seed), dim=1).contiguous().to(device)
    return list(block.split(list(page_bytes), dim=1))


def fused(page_bytes, num_pages, *, device="cpu", seed):
    """K and V of a layer as the halves of one tensor, as SGLang makes them when their shapes are equal."""
    halves = []
    for layer in range(0, len(page_bytes), 2):
        both = torch.stack(pool(page_bytes[layer : layer + 2], num_pages, seed=seed + layer)).to(device)
        halves += [both[0], both[1]]
    return halves


def int64(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


def place_table(places, device="cpu"):
    return int64([[[e.data_ptr() for e in place], [e.stride(0) for e in place]] for place in places], device)


def alignment_bytes(places):
    return math.gcd(
        *(number for place in places for extent in place for number in (extent.data_ptr(), extent.stride(0)))
    )


def launch(
    kernel, places, page_bytes, lists, *, target_row, groups, num_programs, tile_bytes, on_stream=None, stream=0
):
    """Run the kernel group by group; ``lists`` are rows, sources and targets."""
    device = places[0][0].device
    shape = TileShape.fitting(page_bytes, alignment_bytes(places), tile_bytes)
    table = place_table(places, device)
    chunks = torch.tensor(shape.chunks(page_bytes), dtype=torch.int32, device=device)
    rows, sources, targets = (int64(values, device) for values in lists)
    kv_trans = KvTrans(
        table=table.data_ptr(),
        chunks=chunks.data_ptr(),
        page_bytes=page_bytes,
        shape=shape,
        num_programs=num_programs,
        on_stream=on_stream or (lambda _stream: nullcontext()),
        kernel=kernel,
    )
    page_lists = PageLists(rows.data_ptr(), sources.data_ptr(), targets.data_ptr(), len(rows))
    for extents in groups:
        kv_trans.enqueue(stream=stream, lists=page_lists, target_row=target_row, extents=extents)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return shape
