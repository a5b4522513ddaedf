# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from banyan import cli
from banyan_lab import bench


def test_bench_when_json_is_asked_for_then_the_result_is_printed_as_it_is(monkeypatch, capsys):
    rows = [{"geometry": "x", "ratio": 0.9}]
    copies = type("M", (), {"run": staticmethod(lambda: rows)})
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: {"banyan_lab.bench.copy": copies}[name])
    assert bench.main(["copy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_bench_when_it_is_unknown_then_the_choices_are_said(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "nothing"])
    assert "copy" in capsys.readouterr().err
