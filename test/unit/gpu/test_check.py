# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check`` from its facts to its summary, with steps that only say how they ended."""

import importlib
import json
from pathlib import Path

import pytest
from test.unit.gpu.test_steps import MACHINE


@pytest.fixture
def check(monkeypatch, tmp_path):
    """The script on a machine that has everything; it finds what lies beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    script = importlib.import_module("check")
    facts = {name: getattr(MACHINE, name) for name in MACHINE.__slots__}
    monkeypatch.setattr(script, "find_facts", lambda: script.Facts(**facts))
    monkeypatch.setattr(script, "end_on_termination", lambda: None)
    monkeypatch.setenv("OUT_DIR", str(tmp_path))
    return script


def ending(check, monkeypatch, statuses):
    """Every step ends with 0 but for ``statuses``, and says its name; the names of those that were run."""
    ran = []

    def run(step, facts, out):
        ran.append(step.name)
        (out / f"{step.name}.txt").write_text(f"much\nverdict: this is {step.name}\n")
        return statuses.get(step.name, 0)

    monkeypatch.setattr(check, "run", run)
    return ran


def test_check_when_a_step_fails_then_the_others_go_on_and_the_next_run_does_it_alone(
    check, monkeypatch, tmp_path, capsys
):
    ran = ending(check, monkeypatch, {"server-fa3": 1})
    assert check.main([]) == 1
    assert ran[:2] == ["device", "copies"] and ran[-1] == "racecheck" and "server-two-gpus-staged" not in ran
    told = capsys.readouterr().out
    assert "status 1; this is server-fa3" in told and "this is streams" in told
    assert f"{len(ran) - 1} proved, 1 failed, 1 not possible here, 0 not run yet" in told
    at_once = told.split("[gpu-check] server-fa3 ...")[1].splitlines()[1]
    assert at_once.startswith("[gpu-check] server-fa3 ") and "failed" in at_once, "not only when all have ended"
    again = ending(check, monkeypatch, {})
    assert check.main([]) == 0 and again == ["server-fa3"]
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert {known["outcome"] for known in saved.values()} == {"proved", "not possible here"}


def test_check_when_there_is_no_gpu_then_every_step_says_so_and_nothing_counts_as_proved(check, monkeypatch, capsys):
    facts = check.Facts("abc", "no GPU", 0, False, no_gpu="no CUDA GPU on this machine")
    monkeypatch.setattr(check, "find_facts", lambda: facts)
    ran = ending(check, monkeypatch, {})
    assert check.main([]) == 1 and ran == []
    assert f"0 proved, 0 failed, {len(check.STEPS)} not possible here, 0 not run yet" in capsys.readouterr().out


def test_plan_when_asked_for_then_nothing_is_run(check, monkeypatch, capsys):
    ran = ending(check, monkeypatch, {})
    assert check.main(["--list"]) == 0 and ran == []
    assert len(capsys.readouterr().out.splitlines()) == len(check.STEPS)


def test_step_when_it_is_run_then_it_has_the_queues_that_sglang_asks_for_and_what_it_prints_is_kept(check, tmp_path):
    words = "import os; print('verdict:', os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    assert check.run(check.Step("said", ("-c", words)), check.find_facts(), tmp_path) == 0
    assert check.said_by((tmp_path / "said.txt").read_text()) == "8"


def test_step_when_it_takes_longer_than_its_limit_then_it_is_ended_and_counts_as_late(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "LIMIT_S", 0.3)
    words = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    assert check.run(check.Step("long", ("-c", words)), check.find_facts(), tmp_path) < 0
    assert not Path(f"/proc/{(tmp_path / 'long.txt').read_text().split()[1]}").exists()
