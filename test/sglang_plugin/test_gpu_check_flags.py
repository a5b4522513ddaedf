# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu-check`` starts servers with: SGLang and Banyan know every flag of it."""

import argparse

import pytest
from sglang.srt.server_args import ServerArgs
from test.gpu.engine import SERVER
from test.gpu.steps import STEPS
from test.unit.gpu.test_steps import MACHINE

from banyan.sglang_plugin.launcher.flags import after_add_cli_args

SERVED = [step for step in STEPS if step.name.startswith("server-")]


@pytest.mark.parametrize("step", SERVED, ids=lambda step: step.name)
def test_flags_when_a_step_starts_a_server_then_its_parser_takes_them(step):
    arguments = step.arguments(MACHINE, "/out")
    further = arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    # Where another test has loaded plugins, SGLang's own method has added them.
    if "--enable-banyan" not in parser.format_usage():
        after_add_cli_args(None, parser)
    parsed, unknown = parser.parse_known_args(["--model-path", "m", *SERVER, *further])
    assert unknown == [] and parsed.dp_size == 2
