# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.cli import doctor_processor


@pytest.mark.parametrize(
    ("flags", "most", "said"),
    [
        (["avx512f", "amx_bf16"], None, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (["avx512f", "amx_bf16"], "AVX512_CORE_BF16", "oneDNN up to AVX512_CORE_BF16"),
        (["avx512f"], None, "no AMX"),
    ],
)
def test_doctor_when_the_processor_has_amx_then_it_says_what_keeps_tokens_equal(flags, most, said):
    finding = doctor_processor.rounding_of(flags, most)
    assert finding.is_ok and said in str(finding)


@pytest.mark.parametrize(
    ("flags", "said"), [(["avx2", "f16c"], "--dtype float32"), (["avx2", "avx512f", "avx512bw"], "AVX-512")]
)
def test_doctor_when_the_processor_has_no_kernel_for_bfloat16_then_it_names_the_flag(flags, said):
    finding = doctor_processor.bfloat16_of(flags)
    assert finding.is_ok and said in str(finding)
