# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.cli import doctor_processor


@pytest.mark.parametrize(
    ("flags", "most", "said"),
    [
        (["avx512f", "amx_bf16"], None, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (["avx512f", "amx_bf16"], "AVX512_CORE_BF16", "oneDNN up to AVX512_CORE_BF16"),
        (["avx512f", "amx_bf16"], "DEFAULT", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (["avx512f", "amx_bf16"], "AVX512_CORE_AMX", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (["avx512f"], None, "no AMX"),
        (["avx512f"], "AVX512_CORE_BF16", "no AMX"),
    ],
)
def test_doctor_when_the_processor_has_amx_then_it_says_what_keeps_tokens_equal(flags, most, said):
    finding = doctor_processor.rounding(flags, most)
    assert finding.is_ok and said in str(finding)


@pytest.mark.parametrize(
    ("flags", "said"), [(["avx2", "f16c"], "--dtype float32"), (["avx2", "avx512f", "avx512bw"], "AVX-512")]
)
def test_doctor_when_the_processor_has_no_kernel_for_bfloat16_then_it_names_the_flag(flags, said):
    finding = doctor_processor.bfloat16(flags)
    assert finding.is_ok and said in str(finding)


@pytest.mark.parametrize(
    ("machine", "is_ok", "said"),
    [("x86_64", True, "streaming"), ("aarch64", True, "weak memory order"), ("riscv64", False, "make check")],
)
def test_doctor_when_the_processor_is_of_some_kind_then_what_copies_and_whether_it_was_tested(machine, is_ok, said):
    finding = doctor_processor.architecture(machine, "streaming stores (AVX)")
    assert finding.is_ok is is_ok and said in f"{finding.detail} {finding.advice}"


def test_doctor_when_the_processor_is_no_x86_then_nothing_is_said_of_what_was_never_tried(monkeypatch):
    monkeypatch.setattr(doctor_processor.platform, "machine", lambda: "aarch64")
    assert ["tried on x86_64" in found.detail for found in doctor_processor.examine_processor()] == [False, True, True]


def test_native_core_when_asked_then_it_names_what_it_copies_with():
    assert doctor_processor.examine_processor()[0].is_ok
