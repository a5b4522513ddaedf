# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

from bench_fakes import record, run_result

from benchmark.provenance import hardware, provenance
from benchmark.results import append_lines, read_lines


def test_append_when_the_last_line_is_torn_then_later_lines_survive(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    append_lines(path, [{"a": 1}])
    with open(path, "a") as file:
        file.write('{"half": ')
    append_lines(path, [{"b": 2}])
    assert read_lines(path) == [{"a": 1}, {"b": 2}]


def test_lines_when_a_run_is_written_then_requests_come_before_their_summary() -> None:
    lines = run_result("on", 2, 3, record(text="hello")).to_lines()
    assert [line["kind"] for line in lines] == ["request", "run"]
    assert all((line["label"], line["run"], line["repetition"]) == ("on", 2, 3) for line in lines)
    assert "text" not in lines[0] and len(lines[0]["output_sha256"]) == 64
    assert lines[1]["order"] == ["a"]
    json.dumps(lines, allow_nan=False)


def test_provenance_when_asked_then_names_machine_versions_and_commit() -> None:
    about = provenance()
    assert set(about) == {"date", "hardware", "versions", "commit"}
    assert hardware()["num_cores"] >= 1 and hardware()["memory_bytes"] > 0
    assert about["versions"]["python"].startswith("3.")
