# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check`` from its facts to its summary, with steps that only say how they ended."""

import importlib
import json
from dataclasses import dataclass
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


@dataclass
class Ended:
    """A step that has run as soon as it is started."""

    step: object
    ends_with: int
    began_s: float = 0.0

    def status(self):
        return self.ends_with

    def stop(self):
        pass


def ending(check, monkeypatch, statuses):
    """Every step ends with 0 but for ``statuses``, and says its name; the names of those that were run."""
    ran = []

    def start(step, facts, out):
        ran.append(step.name)
        (out / f"{step.name}.txt").write_text(f"much\nverdict: this is {step.name}\n")
        return Ended(step, statuses.get(step.name, 0))

    monkeypatch.setattr(check, "start", start)
    monkeypatch.setattr(check, "POLL_S", 0)
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
    facts = check.Facts("abc", "no GPU", 0, no_gpu="no CUDA GPU on this machine")
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
    assert ended(check, check.Step("said", ("-c", words)), tmp_path) == [("said", 0)]
    assert check.said_by((tmp_path / "said.txt").read_text()) == "8"


def test_step_when_it_takes_longer_than_its_limit_then_it_is_ended_and_counts_as_late(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "LIMIT_S", 0.3)
    words = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    ((_, status),) = ended(check, check.Step("long", ("-c", words)), tmp_path)
    assert status < 0
    assert not Path(f"/proc/{(tmp_path / 'long.txt').read_text().split()[1]}").exists()


def ended(check, step, folder, *, num_at_once=1):
    """The name of what was run, and its status."""
    found = []
    steps, note = (
        [step] if isinstance(step, check.Step) else step,
        lambda one, status: found.append((one.step.name, status)),
    )
    check.run_all(steps, check.find_facts(), folder, num_at_once=num_at_once, ended=note)
    return found


def test_steps_when_there_are_jobs_then_they_run_beside_each_other(check, tmp_path):
    words = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    waiting = check.Step("waiting", ("-c", words, str(tmp_path / "there")))
    writing = check.Step(
        "writing", ("-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", waiting.command[2])
    )
    said = ended(check, [waiting, writing], tmp_path, num_at_once=2)
    printed = [(tmp_path / f"{step.name}.txt").read_text() for step in (waiting, writing)]
    assert sorted(said) == [("waiting", 0), ("writing", 0)], printed


def test_steps_when_some_measure_then_they_run_alone_behind_the_others(check, monkeypatch):
    ran = ending(check, monkeypatch, {})
    monkeypatch.setenv("JOBS", "4")
    assert check.main([]) == 0
    timed = [step.name for step in check.STEPS if step.is_timed]
    assert "bench" in timed and ran[-len(timed) :] == timed and len(set(ran)) == len(ran)
