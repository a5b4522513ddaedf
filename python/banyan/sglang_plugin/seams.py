# SPDX-License-Identifier: Apache-2.0
"""Registers the patch queue with SGLang and proves that it took.

SGLang swallows a plugin's exceptions and skips hooks that do not apply. So nothing is taken on trust: the main process
compares fingerprints before it turns Banyan on, and the first object that Banyan builds in another process calls
``verify``: without one of its hooks a process shares nothing. No hook can raise into SGLang (``banyan.faults``).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from banyan import faults, patches
from banyan.sglang_plugin import runtime

_QUEUE = patches.load_queue()
_HOOK_TYPES = {"before": HookType.BEFORE, "after": HookType.AFTER, "around": HookType.AROUND}


def register() -> None:
    """Register every hook whose module this process uses. Importing a module only to hook it would cost seconds."""
    is_main = runtime.is_main_process()
    for patch in _QUEUE:
        if patch.hook is None:
            continue
        if patch.kind == "register":
            if not is_main and "sglang.srt.managers.scheduler" in sys.modules:
                _resolve(patch.hook)()
            continue
        wanted_here = is_main if "main" in patch.processes else not is_main and _is_used(patch)
        if wanted_here:
            HookRegistry.register(patch.target, _guarded(patch, _resolve(patch.hook)), _HOOK_TYPES[patch.kind])


def changed() -> list[str]:
    """One line for each upstream source that is not the one Banyan was written against."""
    return patches.changed(_QUEUE)


class NoHooks(RuntimeError):
    """SGLang has skipped hooks."""


def missing(process: str) -> list[str]:
    """What of SGLang has not the hook that ``process`` is to have there."""
    return [
        patch.target
        for patch in _QUEUE
        if patch.kind in _HOOK_TYPES and process in patch.processes and not _is_hooked(patch.target)
    ]


def verify(process: str) -> None:
    """Raises NoHooks unless every hook of ``process`` is in place."""
    skipped = missing(process)
    if skipped:
        raise NoHooks(", ".join(skipped))


def _is_used(patch: patches.Patch) -> bool:
    """Whether this child process uses the target: it is imported, or the scheduler imports it later on."""
    module, _class, _method = patch.target.rsplit(".", 2)
    return module in sys.modules or ("scheduler" in patch.processes and "sglang.srt.managers.scheduler" in sys.modules)


def _guarded(patch: patches.Patch, hook: Any) -> Any:
    """The hook, so that it cannot raise into SGLang."""
    guarded = faults.around if patch.kind == "around" else faults.beside
    return guarded(hook, patch.name, stops=patch.on_failure == "stop")


def _resolve(hook: str) -> Any:
    module, _, name = hook.partition(":")
    return getattr(importlib.import_module(module), name)


def _is_hooked(target: str) -> bool:
    return hasattr(pkgutil.resolve_name(target), "__wrapped__")
