# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import subprocess
from pathlib import Path

import pytest
from bench_fakes import record, run_result

from benchmark import provenance as about_runs
from benchmark.provenance import commit, commit_in_words, commit_of_run, hardware, place_and_time, provenance
from benchmark.results import append_lines, read_lines, write_report


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
    assert set(about) == {"date", "hardware", "versions", "commit", "load"}
    assert about["load"]["at_end"]["over_1m"] >= 0 and about["load"]["at_end"]["stolen_s"] is not None
    assert hardware()["num_cores"] >= 1 and hardware()["memory_bytes"] > 0
    assert about["versions"]["python"].startswith("3.")


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("0123456789abcdef" + 24 * "0", "commit 0123456789"),
        ("0123456789abcdef" + 24 * "0" + "-dirty", "commit 0123456789-dirty"),
        ("0123456789abcdef" + 24 * "0" + "-dirty-moved", "commit 0123456789-dirty-moved"),
        (None, "commit unknown"),
    ],
)
def test_commit_when_it_is_told_then_a_dirty_checkout_is_never_called_clean(kept: str | None, words: str) -> None:
    assert commit_in_words(kept) == words
    where = {"commit": kept, "date": "2026-11-23T08:00:00", "hardware": {"cpu_model": "A processor", "num_cores": 2}}
    assert place_and_time(where).startswith(f"{words}, 2026-11-23, ")


@pytest.mark.parametrize(
    ("at_start", "now", "told"),
    [
        ("abc", "abc", "abc"),
        ("abc", "def", "abc-moved"),
        ("abc", "abc-dirty", "abc-moved"),
        ("abc-dirty", "abc-dirty", "abc-dirty"),
        (None, None, None),
    ],
)
def test_commit_when_the_checkout_changes_in_a_run_then_that_of_the_start_is_told_and_marked(
    at_start: str | None, now: str | None, told: str | None
) -> None:
    assert commit_of_run(at_start, now) == told


def test_report_when_somebody_commits_before_its_end_then_it_has_the_commit_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(about_runs, "AT_START", "that-ran")
    monkeypatch.setattr(about_runs, "commit", lambda folder: "that-came-later")
    write_report(tmp_path / "report.json", {}, argparse.Namespace())
    assert json.loads((tmp_path / "report.json").read_text())["provenance"]["commit"] == "that-ran-moved"


def test_commit_when_a_module_is_new_then_the_checkout_is_dirty_and_other_new_files_do_not_matter(
    tmp_path: Path,
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "log.txt").write_text("")
    clean = commit(tmp_path)
    assert clean is not None and "-" not in clean
    (tmp_path / "new.py").write_text("")
    assert commit(tmp_path) == f"{clean}-dirty"
