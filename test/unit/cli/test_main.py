# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan import cli
from banyan.cli import doctor


def test_bench_when_json_is_asked_for_then_the_result_is_printed_as_it_is(monkeypatch, capsys):
    rows = [{"geometry": "x", "ratio": 0.9}]
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: type("M", (), {"run": staticmethod(lambda: rows)}))
    assert cli.main(["bench", "copy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_bench_when_it_is_unknown_then_the_choices_are_said(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "nothing"])
    assert "copy" in capsys.readouterr().err


def test_doctor_when_run_here_then_every_finding_is_well(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["what"] for finding in findings} >= {"sglang", "patch queue", "shared memory"}


@pytest.mark.parametrize(
    ("flags", "most", "said"),
    [
        (["avx512f", "amx_bf16"], None, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (["avx512f", "amx_bf16"], "AVX512_CORE_BF16", "oneDNN up to AVX512_CORE_BF16"),
        (["avx512f"], None, "no AMX"),
    ],
)
def test_doctor_when_the_processor_has_amx_then_it_says_what_keeps_tokens_equal(flags, most, said):
    finding = doctor.cpu_rounding(flags, most)
    assert finding.is_ok and said in finding.detail


def test_doctor_when_a_finding_is_bad_then_advice_and_exit_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("x", False, "broken", "mend it")])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD  x: broken" in out and "mend it" in out
