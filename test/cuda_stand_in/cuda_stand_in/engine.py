# SPDX-License-Identifier: Apache-2.0
"""What SGLang imports on a GPU and cannot find here: names of compiled kernels. Calling one says which it was.

``ENVIRONMENT`` has SGLang compute with torch wherever it can (``SGLANG_FORCE_FUSED_OP_BACKEND``), so few are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

import torch

LOADER = "sglang.kernels.jit.utils.compile.loader"
KERNELS = "sgl_kernel"
VALIDATION = "sglang.srt.arg_groups.validation_hook"
OPERATORS = "sglang.kernels.ops.attention.fla.op"
SAVER = "sglang.srt.utils.torch_memory_saver_adapter"

ENVIRONMENT = {
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
}


def missing(name: str) -> Callable[..., NoReturn]:
    def call(*args: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"the stand-in for a GPU has no kernel {name}")

    return call


class _AfterImport:
    """Changes modules when they have been imported, and makes those that are not there, if they may be made."""

    def __init__(
        self, is_meant: Callable[[str], bool], change: Callable[[ModuleType], None], *, makes_missing: bool
    ) -> None:
        self._is_meant, self._change, self._makes_missing = is_meant, change, makes_missing

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self._is_meant(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return ModuleSpec(name, self, is_package=True) if self._makes_missing else None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change
        return spec

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        self._change(module)


def _compile_nothing(loader: ModuleType) -> None:
    def load_jit(*names: str, **_rest: Any) -> NoReturn:
        raise NotImplementedError(f"the stand-in for a GPU compiles nothing: {names}")

    loader.load_jit = load_jit


def _have_any_card(validation: ModuleType) -> None:
    """Its network cards have the names that the flags give them."""
    validation.validate_ib_devices = lambda named: named


def _have_any_name(module: ModuleType) -> None:
    def named(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{module.__name__}.{name}")

    module.__getattr__ = named


def _look_up_when_called(operators: ModuleType) -> None:
    """Triton's interpreter puts its own functions into Triton's modules while a kernel runs: another name for one that
    was taken before means the compiler's."""
    from triton.language import math

    def named(name: str) -> Callable[[Any], Any]:
        return lambda value: getattr(math, name)(value)

    for name in ("exp", "exp2", "log", "log2"):
        setattr(operators, name, named(name))


def _register_for_host() -> None:
    """Operators that SGLang registers for the device are found where its tensors lie."""
    register = torch.library.Library.impl

    def impl(library: Any, name: Any, function: Any, dispatch_key: str = "", **named: Any) -> None:
        register(library, name, function, dispatch_key, **named)
        # Torch registers its own for the host as well.
        if dispatch_key == "CUDA" and library.ns in ("sglang", "aten"):
            register(library, name, function, "CPU", **named)

    torch.library.Library.impl = impl


def install(put_saver: Callable[[ModuleType], None]) -> None:
    """``put_saver`` puts a stand-in for torch-memory-saver into SGLang's module for it."""
    finders = (
        _AfterImport(lambda name: name == SAVER, put_saver, makes_missing=False),
        _AfterImport(lambda name: name == OPERATORS, _look_up_when_called, makes_missing=False),
        _AfterImport(lambda name: name == LOADER, _compile_nothing, makes_missing=False),
        _AfterImport(lambda name: name == VALIDATION, _have_any_card, makes_missing=False),
        _AfterImport(lambda name: name.split(".")[0] == KERNELS, _have_any_name, makes_missing=True),
    )
    sys.meta_path[:0] = finders
    _register_for_host()
