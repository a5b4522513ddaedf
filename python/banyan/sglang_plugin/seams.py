# SPDX-License-Identifier: Apache-2.0
"""Registers the patch queue with SGLang and proves that it took.

SGLang swallows a plugin's exceptions and skips hooks that do not apply. So nothing is taken on trust: the main process
compares fingerprints before it turns Banyan on, and the first object that Banyan builds in another process calls
``verify``: without a hook of the core, or of a feature that this server needs, a process shares nothing; without one of
another feature, that feature is off in it. No hook can raise into SGLang (``banyan.faults``).

Hooks of a feature that is off are not registered. In the main process they are registered before the flags are known,
and pass through.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from banyan import faults, patches
from banyan.feature_list import CORE, Off, absent, switched_off
from banyan.sglang_plugin import runtime

logger = logging.getLogger("banyan")

_ABSENT = absent()
_QUEUE = [patch for patch in patches.load_queue() if patch.feature not in {off.name for off in _ABSENT}]
"""Of the features that are installed."""

_HOOK_TYPES = {"before": HookType.BEFORE, "after": HookType.AFTER, "around": HookType.AROUND}

_broken: dict[str, ImportError | AttributeError] = {}
"""Patches whose hook cannot be loaded: it imports what SGLang does not have."""


def register() -> None:
    """Register every hook whose module this process uses. Importing a module only to hook it would cost seconds."""
    is_main = runtime.is_main_process()
    if not is_main:
        runtime.heed_main()
    for patch in _QUEUE:
        if patch.hook is None or not runtime.is_on(patch.feature, patch.name):
            continue
        try:
            _register(patch, is_main=is_main)
        except (ImportError, AttributeError) as error:
            # Said by who asks for what is missing, where Banyan is on at all.
            _broken[patch.name] = error


def _register(patch: patches.Patch, *, is_main: bool) -> None:
    assert patch.hook is not None
    if patch.kind == "register":
        if not is_main and "sglang.srt.managers.scheduler" in sys.modules:
            _resolve(patch.hook)()
        return
    for place in patch.places:
        wanted_here = is_main if "main" in patch.processes else not is_main and _is_used(patch, place.target)
        if wanted_here:
            hook = _while_on(patch, _guarded(patch, _resolve(patch.hook)))
            HookRegistry.register(place.target, hook, _HOOK_TYPES[patch.kind])


def unfit() -> list[Off]:
    """What is off on this SGLang, for sources that are not those that Banyan was written against, or for hooks that the
    main process lacks; and what is not installed."""
    return [*switched_off([*patches.changed(_QUEUE), *missing("main")]), *_ABSENT]


class NoHooks(RuntimeError):
    """SGLang has skipped hooks that nothing can do without."""


def missing(process: str) -> list[patches.Misfit]:
    """The hooks that ``process`` is to have and has not."""
    return [
        patches.Misfit(patch, place, f"{place.target} has no hook ({_broken.get(patch.name, 'SGLang has skipped it')})")
        for patch in _QUEUE
        if patch.kind in _HOOK_TYPES and process in patch.processes and runtime.is_on(patch.feature, patch.name)
        for place in patch.places
        if not _is_hooked(place.target)
    ]


def verify(process: str) -> None:
    """Switch off, in this process, the features of which a hook is not in place.

    Raises:
        NoHooks: where this server cannot do without one.
    """
    off = switched_off(missing(process))
    if not off:
        return
    needed = {CORE, *runtime.needed()}
    for one in off:
        if one.feature.name in needed:
            raise NoHooks(one.line)
        runtime.switch_off(one.name)
        logger.warning("banyan: in this process %s", one.line)


def _is_used(patch: patches.Patch, target: str) -> bool:
    """Whether this child process uses the target: it is imported, or the scheduler imports it later on."""
    module, _class, _method = target.rsplit(".", 2)
    return module in sys.modules or ("scheduler" in patch.processes and "sglang.srt.managers.scheduler" in sys.modules)


def _guarded(patch: patches.Patch, hook: Any) -> Any:
    """The hook, so that it cannot raise into SGLang."""
    guarded = faults.around if patch.kind == "around" else faults.beside
    return guarded(hook, patch.name, stops=patch.on_failure == "stop")


def _while_on(patch: patches.Patch, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which does nothing from the moment on when its feature is off in this process."""
    if patch.feature == CORE:
        return hook

    @functools.wraps(hook)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if runtime.is_on(patch.feature, patch.name):
            return hook(original, *args, **kwargs)
        return original(*args, **kwargs)

    @functools.wraps(hook)
    def beside(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if runtime.is_on(patch.feature, patch.name) else None

    return around if patch.kind == "around" else beside


def _resolve(hook: str) -> Any:
    module, _, name = hook.partition(":")
    return getattr(importlib.import_module(module), name)


def _is_hooked(target: str) -> bool:
    try:
        return hasattr(pkgutil.resolve_name(target), "__wrapped__")
    except (ImportError, AttributeError):
        return False
