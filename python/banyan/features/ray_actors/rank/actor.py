# SPDX-License-Identifier: Apache-2.0
"""How an actor of Ray's comes to have Banyan's hooks: they are loaded when it takes up SGLang's arguments, before it
builds the scheduler. SGLang loads plugins in every process that it starts itself, and in no actor.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.plugins import load_plugins

from banyan import config
from banyan.sglang_plugin import runtime


class Start:
    """Travels with SGLang's arguments: an actor that takes them up is a rank from then on."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken_up, (os.getpid(), runtime.features_off(), config.inherited())


def _taken_up(driver: int, off: Sequence[str], variables: Mapping[str, str]) -> Start:
    # The driver copies its arguments too, and what it spawns loads plugins by itself.
    if os.getpid() != driver and multiprocessing.parent_process() is None:
        _become_rank(off, variables)
    return Start()


def _become_rank(off: Sequence[str], variables: Mapping[str, str]) -> None:
    """``off``: features that the driver has switched off. ``variables``: what ranks inherit from it elsewhere."""
    config.inherit(variables)
    runtime.become_rank()
    runtime.switch_off(*off)
    # Hooks are put on what is imported.
    importlib.import_module("sglang.srt.managers.scheduler")
    load_plugins()
