# SPDX-License-Identifier: Apache-2.0
"""Whether a server runs with the engine. The main process decides it and marks the arguments, which travel to all
other processes of the server.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.runtime_context import get_server_args

MARK = "_banyan_cpu_engine"
"""Attribute of ServerArgs: underscore names are never sealed and are pickled to every child process."""


def mark(server_args: Any) -> None:
    """The server of these arguments runs with the engine."""
    setattr(server_args, MARK, True)


def is_marked(server_args: Any) -> bool:
    """Whether the server of these arguments runs with it."""
    return bool(getattr(server_args, MARK, False))


def is_on() -> bool:
    """Whether the server of this process runs with it."""
    return is_marked(get_server_args())


def around(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook around a function of SGLang's, which passes through on a server without the engine."""

    @functools.wraps(hook)
    def where_on(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs) if is_on() else original(*args, **kwargs)

    return where_on


@contextlib.contextmanager
def accelerator_is_cpu() -> Iterator[None]:
    """Who asks torch for its accelerator meanwhile gets the CPU: torch names CUDA wherever it was built with it."""
    named = torch.get_device_module
    torch.get_device_module = lambda device=None: named("cpu" if device is None else device)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_device_module = named
