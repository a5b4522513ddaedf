# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu-check`` does next, and what it says of each step."""

from dataclasses import asdict, replace

import pytest
from test.gpu.steps import FAILED, LIMIT_S, NOT_POSSIBLE, PROVED, STEPS, Facts, Ledger, ledger_of

EVERYTHING = frozenset({"pytest", "hypothesis", "sglang", "flashinfer", "sgl_kernel.flash_attn"})
MACHINE = Facts(
    commit="abc",
    gpu="H200",
    num_gpus=2,
    has_peer_access=True,
    modules=EVERYTHING,
    tools=frozenset({"compute-sanitizer"}),
    model_path="/model",
    mla_model_path="/mla",
    dsa_model_path="/dsa",
    draft_model_path="/draft",
    window_model_path="/window",
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
        ({"modules": EVERYTHING - {"sglang"}}, "server-plain", "no SGLang"),
        ({"modules": EVERYTHING - {"hypothesis"}}, "tests", "hypothesis"),
        ({"modules": EVERYTHING - {"flashinfer"}}, "server-flashinfer", "flashinfer"),
        ({"modules": EVERYTHING - {"sgl_kernel.flash_attn"}}, "server-fa3", "sgl_kernel.flash_attn"),
        ({"missing_to_compile": ("openssl/sha.h",)}, "server-graphs", "openssl/sha.h"),
        ({"tools": frozenset()}, "memcheck", "compute-sanitizer"),
        ({"num_gpus": 1}, "server-two-gpus", "one GPU"),
        ({"has_peer_access": False}, "server-two-gpus", "cannot read each other"),
    ],
)
def test_step_when_the_machine_lacks_something_then_it_is_named_before_a_minute_is_spent(change, name, reason):
    ledger = Ledger()
    assert name not in names(ledger.to_do(replace(MACHINE, **change), []))
    assert ledger.outcomes[name].outcome == NOT_POSSIBLE and reason in ledger.outcomes[name].detail


def test_steps_when_run_again_then_what_was_proved_is_left_out_and_what_failed_is_not():
    ledger = Ledger()
    ledger.note(step("tests"), MACHINE, status=0, seconds=60)
    ledger.note(step("bench"), MACHINE, status=3, seconds=60)
    again = names(ledger_of({name: asdict(known) for name, known in ledger.outcomes.items()}).to_do(MACHINE, []))
    assert "tests" not in again and "bench" in again
    assert names(ledger.to_do(MACHINE, ["tests"])) == ["tests"], "who names a step wants it"
    assert "tests" in names(ledger.to_do(replace(MACHINE, commit="def"), [])), "another commit is another proof"


def test_steps_when_a_name_is_unknown_then_valueerror():
    with pytest.raises(ValueError, match="no such step: what"):
        Ledger().to_do(MACHINE, ["what"])


def test_summary_when_some_were_run_then_every_step_has_a_line():
    ledger = Ledger()
    ledger.to_do(replace(MACHINE, model_path=""), [])
    ledger.note(step("tests"), MACHINE, status=0, seconds=61)
    ledger.note(step("bench"), MACHINE, status=-15, seconds=480)
    lines = {line.split()[0]: line for line in ledger.summary(MACHINE)}
    assert set(lines) == set(names(STEPS))
    assert f"{PROVED} (61 s)" in lines["tests"] and "not run yet" in lines["memcheck"]
    assert f"{FAILED} (480 s): not done within {LIMIT_S} s" in lines["bench"]
    assert f"{NOT_POSSIBLE}: MODEL_PATH is not set" in lines["server-plain"]
    assert ledger.has_failed(MACHINE) and not ledger.has_failed(replace(MACHINE, commit="def"))


def test_commands_when_filled_in_then_no_placeholder_is_left():
    for each in STEPS:
        assert not any("{" in argument for argument in each.arguments(MACHINE, "/out"))
