# SPDX-License-Identifier: Apache-2.0
import json
import socket
import subprocess

import pytest

from banyan import cli
from banyan.cli import doctor, doctor_sglang
from banyan.cli.doctor_sglang import examine_flags, flag_findings, launch_arguments

WELL = {
    **{"refused": [], "failed": [], "is_off": False, "settled": {"page size": 16}},
    **{"choices": None, "store": [], "notes": [], "is_asked": True},
}


@pytest.mark.parametrize(
    ("words", "variables", "arguments"),
    [
        ("--dp 2", "", "--dp 2"),
        ("python -m sglang.launch_server --dp 2", "", "--dp 2"),
        ("sglang serve --dp 2", "", "--dp 2"),
        ("sglang serve M --dp 2", "", "--model-path M --dp 2"),
        ("A_1=x B= sglang serve M", "A_1=x B=", "--model-path M"),
        ("numactl --interleave=all /bin/sglang serve M --dp 2", "", "--model-path M --dp 2"),
        ("--model-path M --served-model-name serve --dp 2", "", "--model-path M --served-model-name serve --dp 2"),
        ("sglang serve M --served-model-name serve --dp 2", "", "--model-path M --served-model-name serve --dp 2"),
        ("env A=0|1 python -m sglang.launch_server --config c=d.yaml", "A=0|1", "--config c=d.yaml"),
    ],
)
def test_arguments_when_the_whole_command_is_given_then_its_variables_and_its_model_count(words, variables, arguments):
    found = launch_arguments(words.split())
    assert found == (variables.split(), arguments.split())


def test_findings_when_lines_are_refusals_then_reason_and_way_out_apart():
    (found,) = flag_findings({**WELL, "refused": ["--page-size 1: too small: use 16"]})
    assert not found.is_ok and found.detail == "--page-size 1: too small" and found.advice == "use 16"


def test_findings_when_sglang_fails_or_another_version_is_there_then_bad():
    assert not flag_findings({**WELL, "failed": ["ValueError: no"]})[0].is_ok
    assert "turn itself off" in flag_findings({**WELL, "is_off": True})[0].detail


def test_findings_when_all_is_well_then_what_is_set_and_what_to_add():
    note, last = flag_findings({**WELL, "notes": ["mind this"], "is_asked": False})
    assert note.hint == "mind this"
    assert last.is_ok and "page size 16" in last.detail and last.hint == "add --enable-banyan to them"
    assert not flag_findings(WELL)[0].hint


@pytest.mark.parametrize("is_kept", [True, False])
def test_findings_when_sglang_chooses_then_both_choices_and_what_to_do_where_they_differ(is_kept):
    choices = {"with": "page size 16", "without": "page size 64", "is_kept": is_kept}
    found = flag_findings({**WELL, "choices": choices})[0]
    assert found.is_ok and found.detail == "page size 16; without Banyan: page size 64"
    assert bool(found.hint) is not is_kept


def answering(monkeypatch, *, stdout="", stderr="", code=0):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    monkeypatch.setattr(doctor_sglang.subprocess, "run", run)
    return asked


def test_flags_when_the_dry_run_answers_then_the_last_line_counts_and_folders_are_named(monkeypatch, tmp_path):
    asked = answering(monkeypatch, stdout="noise\n" + json.dumps({**WELL, "store": [str(tmp_path)]}))
    found, store = examine_flags(["--dp", "2"])
    assert asked[0][1:] == ["-m", doctor_sglang.DRY_RUN, "--dp", "2"]
    assert found[0].is_ok and store == [str(tmp_path)]


def test_flags_when_they_name_a_port_that_somebody_has_then_that_one_is_looked_at(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        answering(monkeypatch, stdout=json.dumps({**WELL, "port": number}))
        found, _ = examine_flags(["--port", str(number)])
    assert found[-1].what == "port of this server" and found[-1].hint
    answering(monkeypatch, stdout=json.dumps({**WELL, "port": 30_000}))
    assert len(examine_flags([])[0]) == 1, "the machine's findings have that one"


def test_flags_when_variables_stand_before_the_command_then_the_dry_run_has_them(monkeypatch, tmp_path):
    said = f"{{**{WELL!r}, 'settled': {{'told': os.environ['TOLD']}}}}"
    (tmp_path / "telling.py").write_text(f"import json, os\nprint(json.dumps({said}))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor_sglang, "DRY_RUN", "telling")
    (found,), _ = examine_flags(["TOLD=a b", "python", "-m", "sglang.launch_server", "--dp", "2"])
    assert found.is_ok and "told a b" in found.detail


def test_flags_when_the_dry_run_breaks_then_its_last_words(monkeypatch):
    answering(monkeypatch, stderr="Traceback\nImportError: no sglang\n", code=1)
    (found,), store = examine_flags([])
    assert not found.is_ok and "ImportError: no sglang" in found.detail and store == ()


def test_command_when_words_follow_two_dashes_then_they_are_the_server_s(monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(doctor, "examine", lambda **given: asked.update(given) or [])
    assert cli.main(["doctor", "--drive", "/d", "--", "--dp", "2", "--json"]) == 0
    assert asked["launch"] == ["--dp", "2", "--json"] and [str(one) for one in asked["drives"]] == ["/d"]
    assert cli.main(["doctor"]) == 0 and asked["launch"] is None
