# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from bench_fakes import WordTokenizer

from benchmark.sharegpt_multiturn import build_parser, make_workload, parse_targets, spelled, text_or_file
from benchmark.workload.sharegpt import DatasetError


def test_targets_when_given_with_pid_then_can_sleep_and_bad_ones_are_refused() -> None:
    with_pid, without = parse_targets(["on=http://h:1/,77", "off=http://h:2"])
    assert with_pid.processes is not None and with_pid.url == "http://h:1"
    assert without.processes is None
    for bad in ("http://h:1", "on=h:1", "on=http://h,x"):
        with pytest.raises(ValueError, match="LABEL=URL"):
            parse_targets([bad])


@pytest.mark.parametrize("mode", ["history", "session"])
def test_workload_when_generated_then_as_many_as_asked_and_no_path_in_its_description(mode: str) -> None:
    args = build_parser().parse_args(["--tokenizer", "/some/where", "--mode", mode, "--num-prompts", "5"])
    workload = make_workload(args, WordTokenizer())
    assert len(workload.scripts) == 5
    assert not any("/" in str(value) for value in workload.description.values())


def test_workload_when_nothing_fits_then_the_error_says_so() -> None:
    args = build_parser().parse_args(["--tokenizer", "x", "--max-total-tokens", "5"])
    with pytest.raises(DatasetError, match="no conversation passes"):
        make_workload(args, WordTokenizer())


def test_workload_when_rate_and_concurrency_then_refused() -> None:
    args = build_parser().parse_args(["--tokenizer", "x", "--request-rate", "2", "--concurrency", "2"])
    with pytest.raises(ValueError, match="exclude each other"):
        make_workload(args, WordTokenizer())


def test_system_prompt_when_a_file_is_named_then_its_text(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("be kind")
    assert text_or_file(str(path)) == "be kind"
    assert text_or_file("just text") == "just text"
    assert text_or_file("long " * 2000).startswith("long")


def test_options_when_written_with_underscores_then_taken_as_others_write_them() -> None:
    written = ["--use_openai_api", "--dataset=./Share_GPT.json", "--tokenizer", "a_b", "--num-prompts", "500"]
    args = build_parser().parse_args(spelled(written))
    assert args.use_openai_api and args.num_prompts == 500
    assert args.dataset == "./Share_GPT.json" and args.tokenizer == "a_b"
