# SPDX-License-Identifier: Apache-2.0
"""The hooks of a queue of patches, in this process: registered with SGLang, and counted.

SGLang swallows a plugin's exceptions, skips hooks that do not apply, and puts no second set of hooks on what has one:
nothing is taken on trust, and ``missing`` looks for each hook in what SGLang calls. No hook can raise into SGLang
(``banyan.faults``).
"""

from __future__ import annotations

import functools
import inspect
import operator
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from banyan import faults
from banyan.patches import Misfit, Patch
from banyan.sglang_plugin import runtime

T = TypeVar("T")
HOOK_TYPES = {"before": HookType.BEFORE, "after": HookType.AFTER, "around": HookType.AROUND}


class Hooks:
    """Those of one queue. ``is_on`` is asked with the names of a patch's feature and of the patch: before a hook is
    registered, and when it is called."""

    def __init__(self, queue: Sequence[Patch], *, is_on: Callable[..., bool]) -> None:
        self.queue = queue
        self._is_on = is_on
        self._broken: dict[str, Exception] = {}
        """Patches whose hook cannot be loaded: it imports what SGLang does not have, or what breaks here."""

    def register(self) -> None:
        """Register every hook whose module this process uses. Importing a module only to hook it would cost seconds."""
        is_main = runtime.answers_clients()
        for patch in self.queue:
            if patch.hook is None or not self._is_on(patch.feature, patch.name):
                continue
            try:
                self._register(patch, is_main=is_main)
            except Exception as error:  # noqa: BLE001 - whatever one import raises, the patches behind it are registered
                # Said by who asks for what is missing, where the hooks are wanted at all.
                self._broken[patch.name] = error

    def _register(self, patch: Patch, *, is_main: bool) -> None:
        assert patch.hook is not None
        if patch.kind == "register":
            if not is_main and "sglang.srt.managers.scheduler" in sys.modules:
                pkgutil.resolve_name(patch.hook)()
            return
        for place in patch.places:
            is_of_children = patch.processes != ("main",)
            wanted_here = "main" in patch.processes if is_main else is_of_children and _is_used(patch, place.target)
            if wanted_here:
                hook = self.while_on(patch, _guarded(patch, pkgutil.resolve_name(patch.hook)))
                hook.of_patch = patch.name  # type: ignore[attr-defined]
                HookRegistry.register(place.target, hook, HOOK_TYPES[patch.kind])

    def missing(self, process: str) -> list[Misfit]:
        """The hooks that ``process`` is to have and has not."""
        return [
            Misfit(
                patch, place, f"{place.target} has no hook ({self._broken.get(patch.name, 'SGLang has skipped it')})"
            )
            for patch in self.queue
            if patch.kind in HOOK_TYPES and process in patch.processes and self._is_on(patch.feature, patch.name)
            for place in patch.places
            if patch.name in self._broken or patch.name not in hooks_on(place.target)
        ]

    def beside_others(self) -> list[Misfit]:
        """The definitions of which a patch relies on what they do, and on which another plugin has a hook: fingerprints
        are of files, and do not tell."""
        return [
            Misfit(patch, source, f"another plugin has a hook on {source.target}")
            for patch in self.queue
            if self._is_on(patch.feature, patch.name)
            for source in patch.sources
            if source.watches == "body" and "" in hooks_on(source.target)
        ]

    def while_on(self, patch: Patch, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, which does nothing from the moment on when its feature is off in this process. It is timed."""
        elsewhere, name = runtime.STOPWATCH.elsewhere, f"{patch.feature}.{patch.name}"
        if not _is_awaited(hook):
            hook = runtime.STOPWATCH.wrap(name, hook)

        @functools.wraps(hook)
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_on(patch.feature, patch.name):
                return hook(elsewhere(original), *args, **kwargs)
            return original(*args, **kwargs)

        @functools.wraps(hook)
        def beside(*args: Any, **kwargs: Any) -> Any:
            return hook(*args, **kwargs) if self._is_on(patch.feature, patch.name) else None

        if patch.kind == "around" and (known := getattr(hook, "known", None)) is not None:
            return _unless_known(runtime.STOPWATCH.sample(f"{name}.known", known), around, patch.name)
        return around if patch.kind == "around" else beside


def known_by(known: Callable[..., tuple[Any] | None]) -> Callable[[T], T]:
    """Decorates a hook around a function that SGLang calls for each stream in each step: ``known`` is asked first with
    that function's arguments, and what it returns, in a tuple, is the result; None: the hook is called."""

    def mark(hook: T) -> T:
        hook.known = known  # type: ignore[attr-defined]
        return hook

    return mark


def _unless_known(known: Callable[..., tuple[Any] | None], hook: Callable[..., Any], where: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            found = known(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - said and counted; the hook answers
            faults.note(where, error)
            found = None
        return hook(original, *args, **kwargs) if found is None else found[0]

    return around


def _is_used(patch: Patch, target: str) -> bool:
    """Whether this child process uses the target: it is imported, or the scheduler imports it later on."""
    module, _class, _method = target.rsplit(".", 2)
    return module in sys.modules or ("scheduler" in patch.processes and "sglang.srt.managers.scheduler" in sys.modules)


def _guarded(patch: Patch, hook: Any) -> Any:
    """The hook, so that it cannot raise into SGLang."""
    guarded = faults.around if patch.kind == "around" else faults.beside
    return guarded(hook, patch.name, stops=patch.on_failure == "stop")


def _is_awaited(hook: Callable[..., Any]) -> bool:
    """Whether its call is no more than its beginning. Such a hook is untimed."""
    return inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook)


def hooks_on(target: str) -> list[str]:
    """Whose hooks SGLang has put there, the last one first: the names of patches, "" for another plugin's. That it is
    a wrapper proves nothing: so are SGLang's own decorators. What nobody has imported has no hooks."""
    module = target
    while module and module not in sys.modules:
        module = module.rpartition(".")[0]
    try:
        found = operator.attrgetter(target.removeprefix(f"{module}."))(sys.modules.get(module))
    except Exception:  # noqa: BLE001 - what cannot be found there has no hook, whatever says so
        return []
    hooks = []
    while hasattr(found, "__wrapped__"):
        if getattr(found, "__globals__", {}).get("__name__") == HookRegistry.__module__:
            # SGLang's wrapper holds the hook and what it is put on, which bears no name of ours.
            names = (getattr(cell.cell_contents, "of_patch", None) for cell in found.__closure__)
            hooks.append(next(filter(None, names), ""))
        found = found.__wrapped__
    return hooks
