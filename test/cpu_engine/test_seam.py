# SPDX-License-Identifier: Apache-2.0
"""The engine's own queue of patches: against the SGLang that is installed, and in a process of its own, as a child."""

import importlib
import json

import pytest
from test import imported

from banyan import patches
from banyan_cpu_engine import seam

CHILD = """
import json
import sys
from types import SimpleNamespace
import sglang.srt.managers.data_parallel_controller
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.plugins import load_plugins
from banyan.sglang_plugin import runtime
from banyan_cpu_engine import seam

runtime.is_main_process = lambda: False
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
for process in ("scheduler", "controller"):
    seam.verify(process)
said = {"backend": "banyan_cpu" in ATTENTION_BACKENDS, "missed": ""}
LoRAManager.__init__ = LoRAManager.__init__.__wrapped__
try:
    seam.verify("scheduler")
except seam.NoHooks as missed:
    said["missed"] = str(missed)
print("REPORT", json.dumps(said))
"""


def test_hooks_when_a_child_loads_the_plugin_then_all_are_in_place_and_one_that_is_missing_is_named():
    run = imported.run(CHILD)
    reports = [line for line in run.stdout.splitlines() if line.startswith("REPORT")]
    assert reports, run.stderr[-2000:]
    report = json.loads(reports[0].removeprefix("REPORT"))
    assert report["backend"] and "cpu_engine/64-adapters-on-cpu" in report["missed"]


@pytest.mark.parametrize("patch", seam.HOOKS.queue, ids=lambda patch: patch.name)
def test_patch_when_sglang_is_the_pinned_one_then_it_fits_and_its_hook_is_there(patch):
    assert patches.changed([patch]) == [] and patch.feature == "cpu_engine"
    module, _, name = patch.hook.partition(":")
    assert module.startswith("banyan_cpu_engine.") and callable(getattr(importlib.import_module(module), name))
    assert len(patch.why) > 20 and len(patch.remove_when) > 5
    assert len(patch.processes) == 1 and set(patch.processes) <= {"main", "controller", "scheduler"}
