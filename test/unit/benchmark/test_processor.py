# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmark.processor import dtype_for, features

CPUINFO = """processor\t: 0
model name\t: AMD EPYC
flags\t\t: fpu avx avx2{more}
processor\t: 1
flags\t\t: fpu avx512bw
"""


@pytest.mark.parametrize(("more", "dtype"), [("", "float32"), (" avx512f avx512bw avx512_bf16", "bfloat16")])
def test_server_when_the_processor_has_no_kernel_for_bfloat16_then_it_is_started_with_float32(more, dtype):
    assert dtype_for(features(CPUINFO.format(more=more))) == dtype


def test_server_when_nothing_is_known_of_the_processor_then_bfloat16():
    assert features("Processor: other\n") == frozenset()
    assert dtype_for(()) == "bfloat16"
