# SPDX-License-Identifier: Apache-2.0
"""``kv_trans_for_dp`` compiled for a Hopper GPU that need not be here: wide accesses, no spills."""

import re

import pytest

from banyan.transport.kv_trans.launch import TileShape

HOPPER = ("cuda", 90, 32)


def compiled(kernel, page_bytes, alignment_bytes):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    shape = TileShape.fitting(page_bytes, alignment_bytes)
    word = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[shape.word_bytes]
    constants = {
        "ITEMS": shape.num_items,
        "CHUNK_WORDS": shape.chunk_words,
        "WORD": word,
        "WORD_BYTES": shape.word_bytes,
        "ALIGNMENT_BYTES": shape.alignment_bytes,
    }
    addresses = ("places", "page_words", "rows", "sources", "targets")
    signature = {
        name: "constexpr" if name in constants else "i64" if name in addresses else "i32" for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget(*HOPPER), options={"num_warps": shape.num_warps})


@pytest.mark.parametrize(
    ("page_bytes", "alignment_bytes", "access"),
    [
        ([16 * 8 * 128 * 2] * 2, 256, r"\.v2\.b64|\.v4\.b32"),
        ([16 * 576 * 2], 256, r"\.v2\.b64|\.v4\.b32"),
        ([16 * 128, 16 * 4], 64, r"\.v2\.b64|\.v4\.b32"),
        ([24], 8, r"\.b64"),
    ],
    ids=["8B, page of 16", "MLA", "fp8 with scales", "aligned to 8 bytes"],
)
def test_kernel_when_compiled_for_hopper_then_its_accesses_are_as_wide_as_the_alignment(
    compiled_kernel, page_bytes, alignment_bytes, access
):
    ptx = compiled(compiled_kernel, page_bytes, alignment_bytes).asm["ptx"]
    for kind in ("ld", "st"):
        assert re.search(rf"{kind}\.global[.\w]*({access})", ptx), f"no {kind} as wide as {access}"
    assert ".local" not in ptx
