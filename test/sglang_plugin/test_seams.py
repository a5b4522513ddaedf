# SPDX-License-Identifier: Apache-2.0
"""Hooks in a process of their own, as in SGLang's children: applied there, missed when one is not, and not there where
their feature is off."""

import json
import pkgutil

import pytest
from test import imported
from uvicorn.main import STARTUP_FAILURE

from banyan import config, patches
from banyan.sglang_plugin import hook_queue, runtime, seams

CHILD = """
import json
import sys
from types import SimpleNamespace
import sglang.srt.managers.data_parallel_controller
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins import load_plugins
from banyan.sglang_plugin import hook_queue, runtime, seams

runtime.is_main_process = lambda: False
runtime.get_server_args = lambda: SimpleNamespace(_banyan={"needed": sys.argv[2:]})
load_plugins()
for process in ("scheduler", "controller"):
    seams.verify(process)
said = {"refused": ""}
here = [patch for patch in seams.HOOKS.queue if patch.kind in hook_queue.HOOK_TYPES and patch.processes != ("main",)]
said["hooked"] = [
    patch.name for patch in here if all(patch.name in hook_queue.hooks_on(place.target) for place in patch.places)
]
method = {
    "core": (Scheduler, "_create_generation_req"),
    "placement": (Scheduler, "process_input_requests"),
    "victims": (UnifiedRadixCache, "insert"),
}.get(sys.argv[1])
if method:
    setattr(*method, getattr(*method).__wrapped__)
try:
    seams.verify("scheduler")
except seams.NoHooks as refusal:
    said["refused"] = str(refusal)
said["off"] = runtime.features_off()
print("REPORT", json.dumps(said))
"""


def child(*arguments, off=""):
    run = imported.run(CHILD, *arguments, variables={config.OFF_VARIABLE: off})
    reports = [line for line in run.stdout.splitlines() if line.startswith("REPORT")]
    assert reports, run.stderr[-2000:]
    return json.loads(reports[0].removeprefix("REPORT")), run.stderr


BESIDE_ANOTHER = """
import json
import sys
from dataclasses import replace
import sglang.srt.managers.scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from banyan.sglang_plugin import hook_queue, runtime, seams

runtime.is_main_process = lambda: False
updated, commands, created = (
    next(patch for patch in seams.HOOKS.queue if patch.name == name)
    for name in ("33-weights-updated", "34-memory-commands", "30-request-created")
)

def watch(*args, **kwargs):
    return None

for place in (*updated.places, *commands.places):
    HookRegistry.register(place.target, watch, HookType.BEFORE)
if "early" in sys.argv:
    HookRegistry.apply_hooks()
if "broken" in sys.argv:
    seams.HOOKS.queue[seams.HOOKS.queue.index(updated)] = replace(updated, hook="banyan.nowhere:around")
seams.register()
HookRegistry.apply_hooks()
print("REPORT", json.dumps([
    sorted({misfit.patch.name for misfit in seams.HOOKS.missing("scheduler")}),
    sorted({misfit.patch.name for misfit in seams.HOOKS.beside_others()}),
    hook_queue.hooks_on(created.target),
]))
"""


@pytest.mark.parametrize(
    ("when", "missing"),
    [
        ("late", []),
        ("early", ["33-memory-released", "33-weights-updated", "34-memory-commands"]),
        ("broken", ["33-weights-updated"]),
    ],
)
def test_hooks_when_another_plugin_has_one_on_their_targets_then_ours_alone_count_and_watched_bodies_are_named(
    when, missing
):
    run = imported.run(BESIDE_ANOTHER, when)
    (report,) = [line for line in run.stdout.splitlines() if line.startswith("REPORT")] or [run.stderr[-2000:]]
    assert json.loads(report.removeprefix("REPORT")) == [missing, ["34-memory-commands"], ["30-request-created"]]


HTTP_WORKER = """
import json
from banyan.sglang_plugin import runtime

runtime.is_main_process = lambda: False
from banyan.sglang_plugin.launcher.http_worker import app
from banyan.sglang_plugin import seams
from sglang.srt.entrypoints import http_server

assert app is http_server.app
missing = [str(misfit) for misfit in seams.HOOKS.missing("main")]

from sglang.srt.server_args import ServerArgs
from sglang.srt.runtime_context import publish
from banyan import _native, faults

faults.note("before SGLang has told its arguments", ValueError())
args, table = ServerArgs(model_path="dummy", device="cpu"), _native.RankTable.create(2)
setattr(args, runtime.BOOKKEEPING, {"rank_table": table.path})
args.resolve_once()
publish(args, role="tokenizer")
faults.note("here", ValueError())
before_app = [one.cls.__name__ for one in app.user_middleware]
print("REPORT", json.dumps([missing, table.num_failures, before_app.count("EndRefusal")]))
"""


def test_http_worker_when_sglang_starts_several_then_each_has_hooks_of_the_main_process_and_counts_its_failures():
    run = imported.run(HTTP_WORKER)
    (report,) = [line for line in run.stdout.splitlines() if line.startswith("REPORT")] or [run.stderr[-2000:]]
    assert json.loads(report.removeprefix("REPORT")) == [[], 1, 1]


def test_off_when_a_process_has_no_hook_of_what_is_off_then_it_is_nothing_to_it(monkeypatch):
    monkeypatch.setattr(runtime, "features_off", lambda: ("14-grpc-requests", "34-memory-commands", "windows"))
    monkeypatch.setattr(seams.HOOKS, "missing", lambda process: [])
    assert seams.off("scheduler") == ["34-memory-commands", "windows"]


WORKER_WITHOUT_HOOKS = """
from banyan.sglang_plugin import runtime, seams

runtime.is_main_process = lambda: False
seams.HOOKS.register = lambda: None
import banyan.sglang_plugin.launcher.http_worker
print("REPORT it serves")
"""


def test_http_worker_when_it_lacks_hooks_of_the_core_then_it_does_not_serve_and_is_not_started_again():
    run = imported.run(WORKER_WITHOUT_HOOKS)
    assert "REPORT" not in run.stdout and "banyan: refused: an HTTP worker" in run.stderr
    assert run.returncode == STARTUP_FAILURE


def test_verify_when_sglang_skipped_a_hook_of_the_core_then_it_is_named():
    report, _ = child("core")
    assert report["off"] == []
    assert "Scheduler._create_generation_req" in report["refused"]


def test_verify_when_sglang_skipped_a_hook_of_what_it_decorates_itself_then_it_is_missed():
    report, said = child("placement")
    assert report["off"] == ["placement"]
    assert "Scheduler.process_input_requests has no hook" in said


@pytest.mark.parametrize("needed", [[], ["core", "victims"]])
def test_verify_when_sglang_skipped_another_hook_then_its_feature_is_off_unless_it_is_needed(needed):
    report, said = child("victims", *needed)
    assert bool(report["refused"]) is bool(needed)
    assert report["off"] == ([] if needed else ["victims"])
    assert ("victims is off (SGLang evicts by age" in said) is not bool(needed)


def test_hooks_when_one_breaks_while_it_is_loaded_then_the_others_are_registered_and_it_is_named(monkeypatch):
    broken, well = [patch for patch in patches.load_queue() if patch.processes == ("main",)][:2]
    resolve_name, registered = pkgutil.resolve_name, []

    def resolve(name):
        if name in (broken.hook, broken.target):
            raise OSError("a library is gone")
        return resolve_name(name)

    monkeypatch.setattr(pkgutil, "resolve_name", resolve)
    monkeypatch.setattr(hook_queue.HookRegistry, "register", lambda target, *hook: registered.append(target))
    monkeypatch.setattr(runtime, "answers_clients", lambda: True)
    hooks = hook_queue.Hooks([broken, well], is_on=lambda *names: True)
    hooks.register()
    assert registered == [well.target]
    (misfit,) = [misfit for misfit in hooks.missing("main") if misfit.patch is broken]
    assert "a library is gone" in misfit.reason


def test_hooks_when_their_feature_is_off_in_the_main_process_then_they_are_not_registered():
    off = {"victims", "planner", "51-server-info"}
    report, _ = child("nothing", off=",".join(off))
    queue = [patch for patch in patches.load_queue() if patch.kind in ("before", "after", "around")]
    here = [patch for patch in queue if patch.processes != ("main",)]
    expected = {patch.name for patch in here if not {patch.feature, patch.name} & off}
    assert set(report["hooked"]) == expected
    assert report["off"] == sorted(off) and not report["refused"]
