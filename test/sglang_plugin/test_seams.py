# SPDX-License-Identifier: Apache-2.0
"""Hooks in a child process, as SGLang starts its own: applied there, and missed when one is not."""

import multiprocessing
import os


def _report_seams(pipe):
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins

    from banyan.sglang_plugin import runtime, seams

    load_plugins()
    report = {"backend": "banyan_cpu" in ATTENTION_BACKENDS, "verified": [], "refused": ""}
    for process in ("scheduler", "controller"):
        seams.verify(process)
        report["verified"].append(process)
    Scheduler._create_generation_req = Scheduler._create_generation_req.__wrapped__
    try:
        seams.verify("scheduler")
    except runtime.Refused as refusal:
        report["refused"] = str(refusal)
    pipe.send(report)


def test_verify_when_sglang_skipped_a_hook_then_the_child_refuses_and_names_it():
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report_seams, args=(sender,))
    child.start()
    assert receiver.poll(120), "the child did not report"
    report = receiver.recv()
    child.join(30)
    assert report["backend"]
    assert report["verified"] == ["scheduler", "controller"]
    assert "Scheduler._create_generation_req" in report["refused"]
