# SPDX-License-Identifier: Apache-2.0
"""Memory that SGLang gives to a trainer and takes again, on a machine without a GPU: the commands do the same, but that
nothing is unmapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from banyan_cpu_engine import server


@server.around
def around_release(original: Callable[..., Any], updater: Any, command: Any) -> Any:
    """SGLang waits for torch's accelerator, whatever device it serves on."""
    with server.accelerator_is_cpu():
        return original(updater, command)
