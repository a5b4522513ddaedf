# SPDX-License-Identifier: Apache-2.0
"""Launch lines and what is said of them: read as the pinned release spells them, counted by what refuses them."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmark.recipes import judging, lines, table
from benchmark.recipes.__main__ import judged, kind_of
from benchmark.recipes.lines import Line, Verdict

REFUSED = Verdict(False, reasons=("--pp-size 2: stages may disagree: use --pp-size 1", "this model (M) is odd"))


@pytest.fixture
def folder(tmp_path):
    for name in ("llama", "draft-eagle3"):
        (tmp_path / "models" / name).mkdir(parents=True)

    def write(**row):
        told = {"id": "r1", "family": "Llama", "hardware": "H200", "stub": "llama", "rank_kind": "one rank", "env": ""}
        (tmp_path / "recipes.jsonl").write_text(json.dumps({**told, **row}) + "\n")
        return lines.of_folder(tmp_path)

    return write


def test_line_when_its_flags_were_renamed_then_it_has_those_of_the_pinned_release(folder):
    (line,) = folder(
        args="--tp 8 --mamba-scheduler-strategy extra_buffer --dsa-prefill-cp-mode in-seq-split --nsa-decode-backend x"
    )
    expected = ("--tp", "8", "--mamba-radix-cache-strategy", "extra_buffer", "--cp-strategy", "zigzag")
    assert line.arguments == (*expected, "--dsa-decode-backend", "x") and not line.is_in_step


@pytest.mark.parametrize("mode", ["", " --dsa-prefill-cp-mode round-robin-split"])
def test_line_when_context_parallelism_has_no_strategy_then_it_has_the_one_that_the_pinned_release_takes(folder, mode):
    (line,) = folder(args=f"--enable-nsa-prefill-context-parallel{mode}")
    assert line.arguments == ("--enable-prefill-cp", "--cp-strategy", "interleave")


def test_line_when_it_names_a_draft_then_it_gets_the_folder_of_its_configuration(folder, tmp_path):
    (line,) = folder(args="--speculative-draft-model-path {draft-eagle3}", env="A=1 B=2", rank_kind="attention DP")
    assert line.arguments == ("--speculative-draft-model-path", str(tmp_path / "models" / "draft-eagle3"))
    assert line.variables == (("A", "1"), ("B", "2")) and line.is_in_step


def test_line_when_it_is_for_other_gpus_then_it_is_left_out(folder):
    assert folder(args="", hardware="MI300X") == []


@pytest.mark.parametrize(("gpu", "kind"), [("H100", "hopper"), ("GB200", "blackwell"), ("B300", "blackwell-ultra")])
def test_gpu_when_it_is_named_then_it_is_judged_as_its_kind(folder, gpu, kind):
    (line,) = folder(args="", hardware=gpu)
    assert kind_of(line) == kind


def test_line_when_banyan_turns_itself_off_then_it_is_not_taken_for_shared(monkeypatch):
    said = {"refused": [], "failed": [], "is_off": True, "notes": ["off, SGLang is not the one"]}
    examining = SimpleNamespace(examine=lambda arguments: said)
    monkeypatch.setitem(sys.modules, "banyan.sglang_plugin.launcher", SimpleNamespace(dry_run=examining))
    (crashed,) = judging._say([])["crashed"]
    assert "SGLang is not the one" in crashed


def test_judge_when_it_ends_then_its_last_words_are_said(monkeypatch, folder):
    ended = subprocess.CompletedProcess([], 1, "", "ImportError: it is gone\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **named: ended)
    with pytest.raises(SystemExit, match="it is gone"):
        judged("hopper", folder(args=""))


def test_verdict_when_it_is_refused_then_each_reason_is_known_by_the_flag_that_it_names_first():
    assert REFUSED.flags == ("--pp-size", "the model") and Verdict(True).flags == ()


def test_page_when_lines_were_judged_then_it_counts_them_by_family_and_by_what_refuses_them(tmp_path):
    def line(name, **other):
        return Line(**{"name": name, "family": "Llama", "model": tmp_path, "arguments": ("--tp", "8"), **other})

    found = [
        (line("a"), Verdict(True)),
        (line("b", is_in_step=True), REFUSED),
        (line("c", family="Odd"), Verdict(False, has_crashed=True, reasons=("KeyError: x",))),
    ]
    outs = [(line("b", arguments=("--banyan-share", "off")), Verdict(True)), (line("c"), Verdict(True))]
    page = table.page(found, outs, "commit abc, 2026-11-26, a machine")
    assert "1 of 3 shared; with ranks in step (data-parallel attention) 0 of 1; 1 crashed.\nCommit abc, 2026" in page
    assert "| Llama | 2 | 1 | `--pp-size` 1, the model 1 | `--enable-banyan --tp 8` |" in page
    assert "| Odd | 1 | 0 | the model 1 | - |" in page
    assert "| the model | 2 | 1 |" in page and "| `--pp-size` | 1 | 0 |" in page
    assert "| shared | 1 |" in page and "| starts, shares nothing | 1 |" in page
