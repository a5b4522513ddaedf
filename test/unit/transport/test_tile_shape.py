# SPDX-License-Identifier: Apache-2.0
"""The tile of a copy: as wide as the alignment allows, and the same bytes in flight whatever the page size."""

import subprocess
import sys
from contextlib import nullcontext

import pytest

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.kv_trans.launch import MAX_ITEMS, TILE_BYTES, KvTrans, TileShape


@pytest.mark.parametrize(
    ("page_bytes", "alignment_bytes", "expected"),
    [
        ([32768, 32768], 256, TileShape(1, 4096, 8, 16)),
        ([16 * 576 * 2], 256, TileShape(16, 256, 8, 16)),
        ([64 * 656], 256, TileShape(32, 128, 8, 16)),
        ([2048, 64], 64, TileShape(16, 256, 8, 16)),
        ([131072], 512, TileShape(1, 4096, 8, 16)),
        ([40], 8, TileShape(512, 8, 8, 8)),
        ([12, 20], 64, TileShape(1024, 8, 4, 4)),
        ([7], 16, TileShape(4096, 8, 1, 1)),
    ],
)
def test_tile_when_it_fits_the_pages_then_words_and_items_follow(page_bytes, alignment_bytes, expected):
    shape = TileShape.fitting(page_bytes, alignment_bytes)
    assert shape == expected
    assert shape.num_items * shape.chunk_bytes <= TILE_BYTES and 1 <= shape.num_warps <= 16


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("token_bytes", [576 * 2, 576, 8 * 128 * 2], ids=["MLA", "MLA fp8", "GQA"])
def test_tile_when_pages_are_a_models_then_no_lane_is_idle(page_tokens, token_bytes):
    assert page_tokens * token_bytes % TileShape.fitting([page_tokens * token_bytes], 256).chunk_bytes == 0


@pytest.mark.parametrize("page_bytes", [[], [64, 0]])
def test_tile_when_a_page_has_no_bytes_then_valueerror(page_bytes):
    with pytest.raises(ValueError, match="no pages"):
        TileShape.fitting(page_bytes, 16)


def test_launch_when_its_last_tile_would_end_beyond_32_bits_then_refused_before_it_runs():
    shape = TileShape.fitting([1], 1)
    assert MAX_ITEMS + shape.num_items <= 2**31 - 1, "the kernel counts items to the end of the last tile"
    kernel = KvTrans(
        table=1 << 40,
        chunks=1 << 40,
        page_bytes=[1],
        shape=shape,
        num_programs=1,
        on_stream=lambda stream: pytest.fail("it was launched"),
        kernel=object(),
    )
    lists = PageLists(1 << 40, 1 << 40, 1 << 40, MAX_ITEMS + 1)
    with pytest.raises(DriverError, match="items in one launch"):
        kernel.enqueue(stream=0, lists=lists, target_row=0, extents=range(1))


def test_transport_when_imported_then_no_accelerator_library_comes_with_it():
    names = "driver description mappings places copies peers readback".split()
    modules = [f"banyan.transport.cuda_ipc.{name}" for name in names] + ["banyan.transport.kv_trans.launch"]
    program = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'triton', 'cuda') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_chunks_when_extents_differ_in_size_then_each_has_as_many_as_it_needs():
    latent, index = 64 * 656, 64 * 132
    shape = TileShape.fitting([latent, index], 256)
    table = shape.chunks([latent, index] * 2)
    rows = [tuple(table[at : at + 3]) for at in range(0, len(table), 3)]
    for extent, size in enumerate([latent, index] * 2):
        words = [range(first, first + num) for found, first, num in rows if found == extent]
        assert [word for chunk in words for word in chunk] == list(range(size // shape.word_bytes))
        assert len(words) == shape.num_chunks(size)
    assert shape.num_chunks(index) < shape.num_chunks(latent)


def launched(page_bytes, lists, extents):
    """The numbers of a launch: first chunk, chunks of a page, tiles."""
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: calls.append(arguments)

    shape = TileShape.fitting(page_bytes, 256)
    kernel = KvTrans(
        table=1 << 40,
        chunks=1 << 40,
        page_bytes=page_bytes,
        shape=shape,
        num_programs=1,
        on_stream=lambda stream: nullcontext(),
        kernel=Kernel(),
    )
    kernel.enqueue(stream=0, lists=lists, target_row=0, extents=extents)
    return shape, calls[0][8:11]


def test_launch_when_extents_differ_in_size_then_no_tile_is_of_chunks_that_are_not_there():
    latent, index = 64 * 656, 64 * 132
    lists = PageLists(1 << 40, 1 << 40, 1 << 40, 100)
    shape, (first_chunk, num_chunks, num_tiles) = launched([latent, index] * 3, lists, range(2, 6))
    assert first_chunk == shape.num_chunks(latent) + shape.num_chunks(index)
    assert num_chunks == 2 * (shape.num_chunks(latent) + shape.num_chunks(index))
    useful_bytes = 100 * 2 * (latent + index)
    assert useful_bytes / (num_tiles * TILE_BYTES) > 0.95
