# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads that say nothing of what prompts have in common."""

from __future__ import annotations

import json

import pytest

from benchmark import ceiling


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,374,44"], "no prompt names a whole block"),
        ([json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]})], "no prompt names"),
        (['{"hash_ids": 1}'], "not a hash trace"),
    ],
)
def test_ceiling_when_a_recording_is_unfit_then_one_line_says_so(lines, says, tmp_path, capsys):
    (tmp_path / "t").write_text("\n".join(lines))
    report = tmp_path / "report.json"
    assert ceiling.main(["--data", str(tmp_path), "--trace", "t", "--out", str(report)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("ceiling: t") and says in said and not report.exists()
