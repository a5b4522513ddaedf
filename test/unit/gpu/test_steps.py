# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu-check`` does next, and what it says of each step."""

from dataclasses import asdict, replace

import pytest
from test.gpu.engine import SERVER
from test.gpu.steps import (
    FAILED,
    FIRST,
    LIMIT_S,
    NOT_POSSIBLE,
    PROVED,
    STEPS,
    Facts,
    Ledger,
    first_verdict,
    ledger_of,
    plan,
    said_by,
)

EVERYTHING = frozenset({"pytest", "hypothesis", "sglang", "sgl_kernel", "flashinfer", "sgl_kernel.flash_attn"})
MACHINE = Facts(
    commit="abc",
    gpu="H200",
    num_gpus=4,
    sm=90,
    modules=EVERYTHING,
    tools=frozenset({"compute-sanitizer"}),
    model_path="/model",
    mla_model_path="/mla",
    dsa_model_path="/dsa",
    draft_model_path="/draft",
    window_model_path="/window",
    state_model_path="/state",
    mtp_model_path="/mtp",
)


def names(steps):
    return [step.name for step in steps]


def step(name):
    return next(step for step in STEPS if step.name == name)


def test_steps_when_the_machine_has_everything_then_all_but_the_impossible_pair_are_to_do():
    ledger = Ledger()
    assert names(ledger.to_do(MACHINE, [])) == [name for name in names(STEPS) if name != "server-two-gpus-staged"]
    assert ledger.outcomes["server-two-gpus-staged"].outcome == NOT_POSSIBLE


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"model_path": ""}, "server-plain", "MODEL_PATH"),
        ({"mla_model_path": ""}, "server-mla", "MLA_MODEL_PATH"),
        ({"dsa_model_path": ""}, "server-dsa-damaged", "DSA_MODEL_PATH"),
        ({"draft_model_path": ""}, "server-eagle", "DRAFT_MODEL_PATH"),
        ({"window_model_path": ""}, "server-windows-damaged", "WINDOW_MODEL_PATH"),
        ({"state_model_path": ""}, "server-states-store", "STATE_MODEL_PATH"),
        ({"mtp_model_path": ""}, "server-two-gpus-attn-dp-mtp", "MTP_MODEL_PATH"),
        ({"modules": EVERYTHING - {"sglang"}}, "server-plain", "no SGLang"),
        ({"modules": EVERYTHING - {"sgl_kernel"}}, "server-plain", "no Python module sgl_kernel"),
        ({"modules": EVERYTHING - {"hypothesis"}}, "device", "hypothesis"),
        ({"modules": EVERYTHING - {"flashinfer"}}, "server-flashinfer", "flashinfer"),
        ({"modules": EVERYTHING - {"sgl_kernel.flash_attn"}}, "server-fa3", "sgl_kernel.flash_attn"),
        ({"sm": 100}, "server-fa3-graphs", "this is SM 100"),
        ({"no_gpu": "no CUDA GPU on this machine"}, "device", "no CUDA GPU"),
        ({"missing_to_compile": ("openssl/sha.h",)}, "server-graphs", "openssl/sha.h"),
        ({"tools": frozenset()}, "memcheck", "compute-sanitizer"),
        ({"num_gpus": 1}, "server-two-gpus", "one GPU"),
        ({"apart": ((0, 1),)}, "server-two-gpus", "GPUs 0 and 1 cannot read each other"),
        ({"apart": ((1, 3),)}, "server-four-gpus-tp", "GPUs 1 and 3 cannot read each other"),
        ({"num_gpus": 1}, "exchange-two-gpus", "one GPU"),
        ({"num_gpus": 1}, "server-two-gpus-attn-dp-full-pool", "one GPU"),
        ({"num_gpus": 2}, "server-four-gpus-tp", "2 GPU(s), of four"),
        ({"mla_model_path": ""}, "server-two-gpus-attn-dp-mla", "MLA_MODEL_PATH"),
    ],
)
def test_step_when_the_machine_lacks_something_then_it_is_named_before_a_minute_is_spent(change, name, reason):
    ledger = Ledger()
    assert name not in names(ledger.to_do(replace(MACHINE, **change), []))
    assert ledger.outcomes[name].outcome == NOT_POSSIBLE and reason in ledger.outcomes[name].detail


def test_steps_when_two_other_gpus_are_apart_then_they_are_staged_and_the_first_two_read_each_other():
    facts = replace(MACHINE, apart=((1, 2), (1, 3)))
    to_do = {step.name: step.arguments(facts, "/out") for step in Ledger().to_do(facts, [])}
    assert "server-two-gpus" in to_do and "server-four-gpus-tp" not in to_do
    staged = to_do["server-two-gpus-staged"]
    assert "--staged" in staged and staged[staged.index("--gpus") + 1] == "1,2"


def test_steps_when_run_again_then_what_was_proved_is_left_out_and_what_failed_is_not():
    ledger = Ledger()
    ledger.note(step("device"), MACHINE, status=0, seconds=60)
    ledger.note(step("bench"), MACHINE, status=3, seconds=60)
    again = names(ledger_of({name: asdict(known) for name, known in ledger.outcomes.items()}).to_do(MACHINE, []))
    assert "device" not in again and "bench" in again
    assert names(ledger.to_do(MACHINE, ["device"])) == ["device"], "who names a step wants it"
    assert "device" in names(ledger.to_do(replace(MACHINE, commit="def"), [])), "another commit is another proof"


def test_steps_when_a_name_is_unknown_then_valueerror():
    with pytest.raises(ValueError, match="no such step: what"):
        Ledger().to_do(MACHINE, ["what"])


def test_summary_when_some_were_run_then_every_step_has_a_line():
    ledger = Ledger()
    ledger.to_do(replace(MACHINE, model_path=""), [])
    ledger.note(step("device"), MACHINE, status=0, seconds=61)
    ledger.note(step("bench"), MACHINE, status=-15, seconds=480)
    *each, counts = ledger.summary(MACHINE)
    lines = {line.split()[0]: line for line in each}
    assert set(lines) == set(names(STEPS))
    num_impossible = sum(NOT_POSSIBLE in line for line in each)
    assert f"{len(STEPS)} steps" in counts and f"1 {PROVED}, 1 {FAILED}, {num_impossible} {NOT_POSSIBLE}" in counts
    assert f"{PROVED} (61 s)" in lines["device"] and "not run yet" in lines["memcheck"]
    assert f"{FAILED} (480 s): not done within {LIMIT_S} s" in lines["bench"]
    assert f"{NOT_POSSIBLE}: MODEL_PATH is not set" in lines["server-plain"]
    assert ledger.has_failed(MACHINE) and not ledger.has_failed(replace(MACHINE, commit="def"))


def test_commands_when_filled_in_then_no_placeholder_is_left():
    for each in STEPS:
        assert not any("{" in argument for argument in each.arguments(MACHINE, "/out"))


def test_plan_when_there_is_no_gpu_then_every_step_has_a_row_that_says_so():
    rows = plan(replace(MACHINE, no_gpu="no CUDA GPU on this machine"))
    assert [row.split()[0] for row in rows] == names(STEPS)
    assert all(f"{NOT_POSSIBLE}: no CUDA GPU" in row for row in rows)
    assert "test/gpu/test_driver.py" in plan(MACHINE)[0]


def test_answer_when_a_step_has_printed_one_then_the_summary_says_it():
    assert said_by("verdict: maybe\n{}\nverdict: 4 of 32 are held up\n") == "4 of 32 are held up"
    assert said_by("a traceback") == ""
    ledger = Ledger()
    ledger.note(step("streams"), MACHINE, status=0, seconds=9, said="4 of 32 are held up")
    ledger.note(step("server-plain"), MACHINE, status=1, seconds=90, said="not so: enough was compared")
    told = "\n".join(ledger.summary(MACHINE))
    assert "proved (9 s): 4 of 32 are held up" in told
    assert "failed (90 s): status 1; not so: enough was compared" in told


def served():
    """Each server step as its model, its cases, and its further arguments with the defaults before them."""
    for each in STEPS:
        if each.name.startswith("server-"):
            command = list(each.command)
            yield each.name, command[command.index("--model-path") + 1], " ".join([*SERVER, *command])


HEADS = [("{model}", backend, graphs) for backend in ("triton", "flashinfer", "fa3") for graphs in ("disabled", "full")]
LATENTS = [("{mla_model}", "triton", "disabled")]
LATENTS += [("{mla_model}", backend, "full") for backend in ("triton", "flashinfer", "fa3")]


@pytest.mark.parametrize(("model", "backend", "graphs"), HEADS + LATENTS)
def test_matrix_when_read_then_each_backend_has_its_rows(model, backend, graphs):
    rows = [
        name
        for name, path, words in served()
        if path == model
        and words.rpartition("--attention-backend ")[2].split()[0] == backend
        and words.rpartition("--cuda-graph-backend-decode ")[2].split()[0] == graphs
    ]
    assert rows


@pytest.mark.parametrize(
    "words",
    [
        "--chunked-prefill-size 512",
        "--max-total-tokens 8192",
        "--kv-cache-dtype fp8_e4m3",
        "--cases store",
        "--banyan-host-gb 4",
        "--staged",
        "--staged --small-pieces",
        "--all-gpus",
    ],
)
def test_matrix_when_read_then_each_situation_has_a_row_with_graphs_or_without(words):
    assert [name for name, _, command in served() if words in command]


def test_first_verdict_when_its_steps_are_done_then_good_only_if_all_were_proved():
    ledger = Ledger()
    assert names(STEPS)[: len(FIRST)] == list(FIRST), "they come first"
    for name in FIRST:
        assert first_verdict(ledger, MACHINE).startswith("not good")
        ledger.note(step(name), MACHINE, status=0, seconds=60)
    assert first_verdict(ledger, MACHINE) == "good (5 proved of 5)"
    ledger.note(step(FIRST[0]), MACHINE, status=1, seconds=60)
    assert first_verdict(ledger, MACHINE) == "not good (4 proved, 1 failed of 5)"
