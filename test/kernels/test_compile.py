# SPDX-License-Identifier: Apache-2.0
"""``kv_trans_for_dp`` compiled for GPUs that need not be here: wide accesses, no spills, and room for the
programs of a partition's grid."""

import re
import subprocess
from pathlib import Path

import pytest

from banyan.transport.kv_trans.launch import TileShape, programs_per_sm

SM_THREADS = {80: 2048, 90: 2048, 100: 2048, 103: 2048, 120: 1536}
"""Ampere, Hopper, Blackwell (two), and a consumer's Blackwell."""

LLAMA, MLA, DSA = [16 * 8 * 128 * 2] * 2, [16 * 576 * 2], [64 * 656, 64 * 132]


def compiled(kernel, page_bytes, alignment_bytes, architecture=90):
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
    addresses = ("places", "chunks", "rows", "sources", "targets")
    signature = {
        name: "constexpr" if name in constants else "i64" if name in addresses else "i32" for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": shape.num_warps})


@pytest.mark.parametrize(
    ("page_bytes", "alignment_bytes", "access"),
    [
        (LLAMA, 256, r"\.v2\.b64|\.v4\.b32"),
        (MLA, 256, r"\.v2\.b64|\.v4\.b32"),
        (DSA, 256, r"\.v2\.b64|\.v4\.b32"),
        ([16 * 128, 16 * 4], 64, r"\.v2\.b64|\.v4\.b32"),
        ([24], 8, r"\.b64"),
    ],
    ids=["8B, page of 16", "MLA", "DSA", "fp8 with scales", "aligned to 8 bytes"],
)
def test_kernel_when_compiled_for_hopper_then_its_accesses_are_as_wide_as_the_alignment(
    compiled_kernel, page_bytes, alignment_bytes, access
):
    ptx = compiled(compiled_kernel, page_bytes, alignment_bytes).asm["ptx"]
    for kind in ("ld", "st"):
        assert re.search(rf"{kind}\.global[.\w]*({access})", ptx), f"no {kind} as wide as {access}"
    assert ".local" not in ptx


@pytest.mark.parametrize("architecture", SM_THREADS)
@pytest.mark.parametrize(
    ("page_bytes", "most_registers", "least_programs"),
    [(LLAMA, 40, 3), (MLA, 64, 2), (DSA, 64, 2)],
    ids=["8B", "MLA", "DSA"],
)
def test_kernel_when_compiled_then_its_registers_leave_room_for_the_programs_of_a_processor(
    compiled_kernel, tmp_path, page_bytes, most_registers, least_programs, architecture
):
    kernel = compiled(compiled_kernel, page_bytes, 256, architecture)
    used = usage(kernel.asm["cubin"], tmp_path)
    num_warps = TileShape.fitting(page_bytes, 256).num_warps
    num_programs = programs_per_sm(num_registers=used["REG"], num_warps=num_warps, sm_threads=SM_THREADS[architecture])
    print(f"sm_{architecture}: {used['REG']} registers, {num_programs} programs of {32 * num_warps} threads")
    assert used["REG"] <= most_registers and num_programs >= least_programs
    assert (used["STACK"], used["LOCAL"], used["SHARED"]) == (0, 0, 0), "it spills, or takes memory that is not counted"


def usage(cubin, folder):
    """What ``cuobjdump``, which Triton brings, says a thread of the kernel takes: REG, STACK, SHARED, LOCAL."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    command = [str(tool), "-res-usage", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (line,) = (line for line in said.stdout.splitlines() if "REG:" in line)
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}


@pytest.mark.parametrize(
    ("num_registers", "num_warps", "sm_threads", "expected"),
    [(32, 16, 2048, 4), (64, 16, 2048, 2), (40, 16, 2048, 3), (46, 16, 1536, 2), (0, 16, 2048, 4), (255, 32, 2048, 1)],
)
def test_programs_when_registers_or_threads_run_out_then_fewer_run_at_once(
    num_registers, num_warps, sm_threads, expected
):
    found = programs_per_sm(num_registers=num_registers, num_warps=num_warps, sm_threads=sm_threads)
    assert found == expected
