# SPDX-License-Identifier: Apache-2.0
"""Hooks in a process of their own, as in SGLang's children: applied there, and missed when one is not."""

import json
import subprocess
import sys

CHILD = """
import json
import sglang.srt.managers.data_parallel_controller
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from banyan.sglang_plugin import runtime, seams

runtime.is_main_process = lambda: False
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
for process in ("scheduler", "controller"):
    seams.verify(process)
Scheduler._create_generation_req = Scheduler._create_generation_req.__wrapped__
try:
    seams.verify("scheduler")
except seams.NoHooks as refusal:
    print("REPORT", json.dumps({"backend": "banyan_cpu" in ATTENTION_BACKENDS, "refused": str(refusal)}))
"""


def test_verify_when_sglang_skipped_a_hook_then_it_is_named():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=180)
    reports = [line for line in child.stdout.splitlines() if line.startswith("REPORT")]
    assert reports, child.stderr[-2000:]
    report = json.loads(reports[0].removeprefix("REPORT"))
    assert report["backend"]
    assert "Scheduler._create_generation_req" in report["refused"]
