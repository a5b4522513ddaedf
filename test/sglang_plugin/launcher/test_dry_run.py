# SPDX-License-Identifier: Apache-2.0
"""The dry run of ``banyan doctor -- ARGUMENTS``, over SGLang's own parser and Banyan's own hooks."""

import pytest

from banyan import config, patches
from banyan.sglang_plugin.launcher.dry_run import examine
from benchmark.modes import models

BASE = ["--device", "cpu", "--dp", "2", "--enable-banyan"]


@pytest.fixture(scope="module")
def model():
    return ["--model-path", str(models.ensure(models.LLAMA))]


def test_dry_run_when_all_is_well_then_what_a_server_would_settle_on(model, tmp_path):
    said = examine([*BASE, *model, "--banyan-store", str(tmp_path), "--banyan-host-gb", "1"])
    assert not (said["refused"] or said["failed"] or said["is_off"])
    assert said["settled"]["page size"] == 16 and said["settled"]["attention"] == "banyan_cpu"
    assert said["store"] == (str(tmp_path),)


@pytest.mark.parametrize(
    ("words", "line", "variable", "is_asked"),
    [
        (["--enable-banyan"], "dp: 2", None, True),
        ([], "enable-banyan: true", None, True),
        ([], "enable-banyan: false", None, False),
        ([], "dp: 2", "--enable-banyan", True),
    ],
    ids=["line", "file", "nowhere", "environment"],
)
def test_dry_run_when_banyan_is_not_turned_on_then_it_is_and_that_is_said(
    words, line, variable, is_asked, model, tmp_path, monkeypatch
):
    if variable is not None:
        monkeypatch.setenv(config.FLAGS_VARIABLE, variable)
    file = tmp_path / "server.yaml"
    file.write_text(f"{line}\n")
    said = examine(["--config", str(file), "--device", "cpu", *model, *words])
    assert said["settled"]["page size"] == 16 and said["is_asked"] is is_asked


@pytest.mark.parametrize("where", ["line", "file"])
def test_dry_run_when_its_flags_are_there_without_the_switch_then_refused_as_at_the_start(where, model, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("banyan-host-gb: 8\n" if where == "file" else "dp: 2\n")
    words = ["--banyan-host-gb", "8"] if where == "line" else []
    (line,) = examine(["--config", str(file), "--device", "cpu", *model, *words])["refused"]
    assert "--banyan-host-gb" in line and "--enable-banyan" in line


def test_dry_run_when_the_environment_turns_banyan_on_then_its_flags_count(model, monkeypatch):
    monkeypatch.setenv(config.FLAGS_VARIABLE, "--enable-banyan --banyan-share off")
    assert examine(["--device", "cpu", *model])["settled"]["sharing"] == "off"


def test_dry_run_when_a_quotation_in_the_environment_does_not_end_then_refused(model, monkeypatch):
    monkeypatch.setenv(config.FLAGS_VARIABLE, "--enable-banyan 'x")
    (line,) = examine([*BASE, *model])["refused"]
    assert config.FLAGS_VARIABLE in line and "close it" in line


def test_dry_run_when_flags_are_refused_then_every_line(model):
    said = examine([*BASE, *model, "--pp-size", "2", "--page-size", "1"])
    assert len(said["refused"]) == 2 and not said["failed"]
    assert any(line.startswith("--page-size 1") for line in said["refused"])


def test_dry_run_when_the_flag_is_unknown_then_what_argparse_says(model):
    said = examine([*BASE, *model, "--no-such-flag"])
    assert "--no-such-flag" in said["failed"][0] and not said["refused"]


def test_dry_run_when_sglang_itself_fails_then_its_words(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    said = examine([*BASE, "--model-path", str(tmp_path)])
    assert said["failed"] and not said["refused"]


def test_dry_run_when_sglang_checks_what_it_has_resolved_then_its_words_too(model):
    said = examine([*BASE, *model, "--served-model-name", "tiny:1"])
    assert "served_model_name cannot contain a colon" in said["failed"][0] and not said["refused"]


@pytest.mark.parametrize("name", ["core", "victims"])
def test_dry_run_when_the_source_has_changed_then_what_would_be_off(name, model, monkeypatch):
    patch = next(patch for patch in patches.load_queue() if patch.feature == name)
    monkeypatch.setattr(patches, "changed", lambda queue: [patches.Misfit(patch, patch.places[0], "y has changed")])
    said = examine([*BASE, *model])
    assert said["is_off"] is (name == "core") and "y has changed" in said["notes"][0]
