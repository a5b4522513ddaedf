# SPDX-License-Identifier: Apache-2.0
"""The main process: the flag, who turns the engine on, and what stands in the way."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.utils import cpu_has_amx_support

from banyan import SGLANG_VERSION, patches
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import cpu_engine
from banyan_cpu_engine import ATTENTION_BACKEND, seam, server

logger = logging.getLogger("banyan")

FLAG = "--enable-banyan-cpu-engine"

NAMING = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    "speculative_draft_attention_backend",
)
"""Arguments that name an attention backend."""

_resolved: Any = None
"""The arguments that SGLang resolves now, or has resolved last."""


def offer() -> None:
    """Let Banyan start its servers on CPUs with the engine."""
    cpu_engine.provide(start)


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
    parser.add_argument(
        FLAG,
        action="store_true",
        help=f"Serve on a CPU with the attention backend {ATTENTION_BACKEND}, unless --attention-backend names another,"
        " with kernels that SGLang has for GPUs only, and with a dispatcher that waits for messages. Shares nothing.",
    )


def after_from_cli_args(server_args: Any, cls: type, args: argparse.Namespace) -> None:
    if getattr(args, "enable_banyan_cpu_engine", False):
        _start_or_refuse(server_args, FLAG)


def before_resolve_once(server_args: Any) -> None:
    global _resolved
    _resolved = server_args
    flag = next((name for name in NAMING if getattr(server_args, name) == ATTENTION_BACKEND), None)
    if flag is not None and not server.is_marked(server_args):
        _start_or_refuse(server_args, f"--{flag.replace('_', '-')} {ATTENTION_BACKEND}")


def start(server_args: Any) -> None:
    """Have a server on a CPU run with the engine, where it fits. The arguments are not resolved yet."""
    reasons = _unfit()
    if not reasons:
        _turn_on(server_args)
    elif server_args.attention_backend != ATTENTION_BACKEND:
        logger.warning("banyan: the CPU engine is off, SGLang's own attention serves: %s", _misfit(reasons))


def around_platform_supports(original: Callable[[], bool]) -> bool:
    """Whether states may be kept beside the one that a request works on (``extra_buffer``). SGLang keeps states of
    state-space models for pages of several tokens only on devices that it names; the CPU is none of them, for want of
    two kernels, which are in ``linear_attention``."""
    return original() or server.is_marked(_resolved)


def _start_or_refuse(server_args: Any, asked: str) -> None:
    device = runtime.device_of(server_args)
    if device != "cpu":
        runtime.refuse(f"{asked}: --device {device} has attention of SGLang's own: drop that flag")
    reasons = _unfit()
    if reasons:
        runtime.refuse(f"{asked}: {_misfit(reasons)}, or drop that flag")
    _turn_on(server_args)


def _turn_on(server_args: Any) -> None:
    if server_args.attention_backend is None:
        server_args.attention_backend = ATTENTION_BACKEND
        if cpu_has_amx_support():
            logger.info("banyan: attention by %s; SGLang's choice: --attention-backend intel_amx", ATTENTION_BACKEND)
    if server_args.enable_memory_saver:
        # With it every rank loads a library of CUDA's driver first, and ends where there is none.
        logger.warning("banyan: --enable-memory-saver is for GPUs: commands that give memory back empty caches only")
        server_args.enable_memory_saver = False
    server.mark(server_args)


def _unfit() -> list[patches.Misfit]:
    """What of it does not fit the SGLang that is installed."""
    return [*patches.changed(seam.HOOKS.queue), *seam.HOOKS.missing("main")]


def _misfit(reasons: list[patches.Misfit]) -> str:
    said = "; ".join(map(str, reasons))
    return f"it does not fit this SGLang ({said}): install sglang=={SGLANG_VERSION} as it was published"
