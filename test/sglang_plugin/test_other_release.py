# SPDX-License-Identifier: Apache-2.0
"""Banyan beside another release of SGLang: a stock server is one, and one that is to share says in a line why not."""

import pytest
from test import imported

from banyan import SGLANG_VERSION, config

LOADED = """
import importlib.metadata, os, sys
version = importlib.metadata.version
importlib.metadata.version = lambda name: os.environ["TEST_VERSION"] if name == "sglang" else version(name)
# What Banyan's hooks import may be gone there.
sys.modules["banyan.sglang_plugin.runtime"] = None
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(["--model-path", "nowhere", "--device", "cpu", *sys.argv[1:]])
print("SERVES", *HookRegistry._hooks)
"""
VARIABLES = {"TEST_VERSION": "0.5.24", "SGLANG_PLUGINS": "banyan"}
LINE = f"sglang 0.5.24 is installed, Banyan works on {SGLANG_VERSION} only: install sglang=={SGLANG_VERSION}"


def lines_of(done):
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if LINE in line]


def test_stock_server_when_sglang_is_another_release_then_it_has_no_hook_but_the_flag_and_one_line_names_both():
    done = imported.run(LOADED, variables=VARIABLES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["SERVES", "sglang.srt.server_args.ServerArgs.add_cli_args"]
    (line,) = lines_of(done)
    assert "refused" not in line


@pytest.mark.parametrize("asked", ["line", "file", "environment"])
def test_server_that_is_to_share_when_sglang_is_another_release_then_one_line_refuses_it(asked, tmp_path):
    words, variables = ["--enable-banyan", "--banyan-store", "/x"], VARIABLES
    if asked == "file":
        (tmp_path / "flags.yaml").write_text("enable-banyan: true\n")
        words = ["--config", str(tmp_path / "flags.yaml")]
    if asked == "environment":
        words, variables = [], {**VARIABLES, config.FLAGS_VARIABLE: "--enable-banyan"}
    done = imported.run(LOADED, *words, variables=variables)
    assert done.returncode == 2 and "SERVES" not in done.stdout
    assert [line for line in lines_of(done) if line.startswith("banyan: refused: ")]


def test_server_when_a_file_says_not_to_share_then_it_is_stock(tmp_path):
    (tmp_path / "flags.yaml").write_text("enable-banyan: false\n")
    done = imported.run(LOADED, "--config", str(tmp_path / "flags.yaml"), variables=VARIABLES)
    assert done.returncode == 0 and "SERVES" in done.stdout


BROKEN = """
from banyan import patches
patches.NUM_PATCHES += 1
from sglang.srt.plugins import load_plugins
load_plugins()
print("SERVES")
"""


@pytest.mark.parametrize(("variables", "serves"), [({}, True), ({config.FLAGS_VARIABLE: "--enable-banyan"}, False)])
def test_program_when_a_file_of_the_wheel_is_gone_then_it_is_stock_or_refused_where_the_environment_asks(
    variables, serves
):
    done = imported.run(BROKEN, variables={"SGLANG_PLUGINS": "banyan", **variables})
    assert ("SERVES" in done.stdout) == serves
    refused = [line for line in done.stderr.splitlines() if line.startswith("banyan: refused: ")]
    assert [done.returncode, len(refused)] == ([0, 0] if serves else [2, 1]), done.stderr
    assert all("install Banyan's wheel anew" in line for line in refused)
