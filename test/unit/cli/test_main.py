# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import json
import subprocess
import sys

import pytest

from banyan import cli
from banyan.cli import doctor
from banyan.router import settings
from banyan_lab import bench


def test_laboratory_when_a_command_is_named_then_its_module_gets_the_rest(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "main", lambda words: asked.append(words) or 3)
    assert cli.main(["bench", "copy", "--json"]) == 3
    assert asked == [["copy", "--json"]]


@pytest.mark.parametrize("words", [["doctor"], ["trace", "http://a", "--prompt", "x"]], ids=" ".join)
def test_command_when_the_native_core_does_not_load_then_the_way_out_and_no_traceback(words):
    script = "import sys\nsys.modules['banyan._native'] = None\nfrom banyan import cli\nsys.exit(cli.main())"
    ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr and not ended.stdout
    assert "install the wheel for this system" in ended.stderr


def test_laboratory_when_it_is_installed_then_every_command_of_the_table_is_an_entry_point():
    entries = importlib.metadata.entry_points(group=cli.COMMANDS)
    assert {entry.name for entry in entries} == set(cli.LABORATORY)
    assert all(callable(entry.load()) for entry in entries)


@pytest.mark.parametrize("is_broken", [False, True], ids=["no entry point", "no module"])
def test_laboratory_when_it_is_missing_then_one_line_says_how_to_have_it(is_broken, monkeypatch, capsys):
    entry = importlib.metadata.EntryPoint("sim", "no_such_module.command:main", cli.COMMANDS)
    monkeypatch.setattr(cli.importlib.metadata, "entry_points", lambda **_: [entry] if is_broken else [])
    assert cli.main(["sim", "dp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("banyan sim: not installed: pip install build/dist/banyan_lab-*.whl")


def test_help_when_asked_for_then_the_laboratory_is_listed_and_not_imported(capsys):
    script = "import sys\nfrom banyan import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    script += "sys.exit(any(name.startswith('banyan_lab') for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "bench" in ended.stdout and "sim" in ended.stdout, ended.stderr


def test_doctor_when_run_here_then_every_finding_is_well(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["what"] for finding in findings} >= {"sglang", "patch queue", "shared memory"}


def test_doctor_when_a_finding_is_bad_then_advice_and_exit_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda **_: [doctor.Finding("x", False, "broken", "mend it")])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD  x: broken" in out and "mend it" in out


def test_route_when_arguments_stand_in_a_file_then_they_are_taken_and_those_behind_it_win(tmp_path):
    file = tmp_path / "router.flags"
    file.write_text("--server=http://a:1/\n--server=http://b:1\n--port=5\n--no-tokenize\n")
    taken = settings.take_flags(cli._parser().parse_args(["route", f"@{file}", "--port", "6"]))
    assert (taken.servers, taken.port, taken.tokenize) == (("http://a:1", "http://b:1"), 6, False)


def test_route_when_the_file_is_missing_or_holds_something_else_then_it_is_refused_by_name(tmp_path, capsys):
    file = tmp_path / "router.flags"
    for text, named in ((None, "router.flags"), ("--prot=5\n", "--prot"), ("--port=x\n", "--port")):
        if text is not None:
            file.write_text(text)
        with pytest.raises(SystemExit):
            cli.main(["route", f"@{file}"])
        assert named in capsys.readouterr().err
