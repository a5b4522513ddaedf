# SPDX-License-Identifier: Apache-2.0
"""The dispatcher in the main process: with ``--use-ray`` it is one of its threads."""

from __future__ import annotations

from banyan.sglang_plugin import seams


def dispatch_here() -> None:
    """Put the dispatcher's hooks in place, before SGLang builds one."""
    seams.HOOKS.register_here("controller")
