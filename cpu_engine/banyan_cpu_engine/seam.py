# SPDX-License-Identifier: Apache-2.0
"""The engine's own queue of patches, in this process. Banyan's code installs it (``sglang_plugin.hook_queue``)."""

from __future__ import annotations

from pathlib import Path

from banyan import patches
from banyan.sglang_plugin.hook_queue import Hooks

HOOKS = Hooks(patches.load_queue(Path(__file__).parent / "patches"), is_on=lambda *names: True)
"""All are registered in every process: whether a server runs with the engine, each asks when it is called."""


class NoHooks(RuntimeError):
    """SGLang has skipped hooks in a process of a server that runs with the engine."""


def verify(process: str) -> None:
    """Raises NoHooks where a hook is not in place."""
    missing = HOOKS.missing(process)
    if missing:
        raise NoHooks(f"banyan-cpu-engine: {'; '.join(map(str, missing))}")
