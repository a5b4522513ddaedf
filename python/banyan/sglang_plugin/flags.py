# SPDX-License-Identifier: Apache-2.0
"""From flags to SGLang's arguments, in the main process: parse, refuse, inject, and leave word for the others."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.utils import is_cpu

from banyan import _native, config
from banyan.config import Config
from banyan.planner import profile
from banyan.refusals import ServerFacts, quota_refusal, refusals
from banyan.sglang_plugin import runtime, seams

logger = logging.getLogger("banyan")

_roster: _native.Roster | None = None
"""Keeps the ranks' meeting place open for as long as this process, their ancestor, lives."""


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    if config.CPU_ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(config.CPU_ATTENTION_BACKEND)
    config.add_flags(parser)


def around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    try:
        wanted = config.take_flags(args)
    except ValueError as error:
        runtime.refuse(str(error))
    if wanted is None:
        return original(cls, args)
    facts = _facts(args, wanted)
    reasons = refusals(facts) if wanted.shares else []
    reasons += _planning_refusals(wanted, args)
    if reasons:
        runtime.refuse(*reasons)
    differences = seams.changed()
    if differences:
        logger.warning("banyan: off, SGLang's source is not the one it was written against: %s", "; ".join(differences))
        return original(cls, args)
    seams.verify("main")
    return _inject(original, cls, args, wanted)


def _inject(original: Callable[..., Any], cls: type, args: argparse.Namespace, wanted: Config) -> Any:
    """Set what the user left open, build the arguments, and attach the bookkeeping that every process reads."""
    global _roster
    if _device(args) == "cpu" and args.attention_backend is None:
        args.attention_backend = config.CPU_ATTENTION_BACKEND
    if args.page_size is None:
        args.page_size = config.DEFAULT_PAGE_TOKENS
    if wanted.prefill_quota_ms is not None and args.prefill_decode_interval is None:
        # SGLang runs all chunks of a prompt before the next decode; the quota is to bound what decodes wait for.
        args.prefill_decode_interval = 1
    carried: dict[str, Any] = {"config": wanted.as_dict()}
    if wanted.shares:
        args.enable_unified_cache_external_linker = True
        args.unified_cache_external_linker_backend = "dynamic"
        args.unified_cache_external_linker_config = {
            "linker": "BanyanLinker",
            "linker_module_path": "banyan.sglang_plugin.linker",
        }
        # A second seat for each shard: its part of the host arena.
        _roster = _native.Roster.create(args.dp_size * args.tp_size * (2 if wanted.host_bytes else 1))
        carried["roster"] = _roster.path
        carried["server"] = uuid.uuid4().hex
    server_args = original(cls, args)
    setattr(server_args, runtime.BOOKKEEPING, carried)
    logger.info("banyan: on, share=%s, %d rank(s), page size %d", wanted.share, args.dp_size, args.page_size)
    return server_args


def _planning_refusals(wanted: Config, args: argparse.Namespace) -> list[str]:
    """One line for each reason why times cannot be predicted or forwards not be cut."""
    reasons = []
    if wanted.profile is not None:
        try:
            profile.load(Path(wanted.profile))
        except profile.BadProfile as error:
            reasons.append(str(error))
    line = quota_refusal(quota_ms=wanted.prefill_quota_ms, chunked_prefill_size=args.chunked_prefill_size)
    return reasons if line is None else [*reasons, line]


def _device(args: argparse.Namespace) -> str:
    return args.device or ("cpu" if is_cpu() else "cuda")


def _facts(args: argparse.Namespace, wanted: Config) -> ServerFacts:
    return ServerFacts(
        sglang_version=importlib.metadata.version("sglang"),
        device=_device(args),
        dp_size=args.dp_size,
        pp_size=args.pp_size,
        num_nodes=args.nnodes,
        page_size=args.page_size if args.page_size is not None else config.DEFAULT_PAGE_TOKENS,
        tokenizer_worker_num=args.tokenizer_worker_num,
        disable_radix_cache=args.disable_radix_cache,
        radix_cache_backend=args.radix_cache_backend,
        enable_hierarchical_cache=args.enable_hierarchical_cache,
        hicache_storage_backend=args.hicache_storage_backend,
        enable_lmcache=args.enable_lmcache,
        enable_flexkv=getattr(args, "enable_flexkv", False),
        external_linker_backend=(
            args.unified_cache_external_linker_backend if args.enable_unified_cache_external_linker else None
        ),
        enable_unified_memory=args.enable_unified_memory,
        enable_memory_saver=args.enable_memory_saver,
        expandable_segments=config.uses_expandable_segments(),
        sizes_pool_after_capture=config.sizes_pool_after_capture(),
        has_arena=wanted.host_bytes > 0,
        speculative_algorithm=args.speculative_algorithm,
        disaggregation_mode=args.disaggregation_mode,
        kv_cache_dtype=args.kv_cache_dtype,
        rust_server=config.uses_rust_server(),
    )
