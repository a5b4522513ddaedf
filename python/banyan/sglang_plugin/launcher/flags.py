# SPDX-License-Identifier: Apache-2.0
"""From flags to SGLang's arguments, in the main process: parse, refuse, inject, and leave word for the others."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from banyan import _native, config, faults
from banyan import feature_list as features
from banyan.config import ARENA_FOLDER, DEFAULT_POLICY, LEVEL_POLICY, PART_FILE, Config
from banyan.feature import Asked
from banyan.layout import Layout
from banyan.mounts import MOUNTS, type_of
from banyan.owner import look_at_folder
from banyan.refusals import (
    MAX_SLOTS,
    ServerFacts,
    environment_refusal,
    late_refusal,
    not_enabled_refusal,
    refusals,
    words_refusal,
)
from banyan.refusals.combinations import idle_lines
from banyan.refusals.kinds import KindFacts
from banyan.refusals.models import ModelFacts
from banyan.refusals.modes import ModeFacts, mode_refusals
from banyan.refusals.speculation import DraftFacts
from banyan.refusals.start import (
    arena_size_refusal,
    fault_refusal,
    http_app_refusal,
    kept_arena_refusal,
    store_refusal,
)
from banyan.refusals.tenant_server import TenantFacts, file_refusal, misfit_refusal, tenant_refusals
from banyan.sglang_plugin import last_words, runtime, seams
from banyan.sglang_plugin.launcher import cpu_engine, engine_code, taken_ids, tenant_salts
from banyan.store.backends import look
from banyan.store.location import FILE, HF3FS, StoreLocation, asked_scheme

logger = logging.getLogger("banyan")

HEARS_LOADS = "total_tokens"
"""One of SGLang's ways to choose ranks, which it does not do then. Of a server over several nodes the ranks tell their
loads over the network, and only with such a way the dispatcher is who listens; else nobody does until ``/v1/loads``."""

F = TypeVar("F")

HTTP_WORKER = "banyan.sglang_plugin.launcher.http_worker:app"

_rank_tables: dict[str, _native.RankTable] = {}
"""By path: keeps the ranks' rendezvous open for as long as this process, their ancestor, lives. A program may have
several Engines."""


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    config.add_flags(parser)


def around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    if not getattr(args, "enable_banyan", False):
        given = config.flags_given(args)
        if given:
            runtime.refuse(not_enabled_refusal(given))
        config.take_flags(args)
        return original(cls, args)
    carried = _turned_on(args, args)
    server_args = original(cls, args)
    _carry(server_args, carried)
    return server_args


def take_environment(server_args: Any) -> None:
    """Turn Banyan on for arguments that a program has built (``Engine``), when the environment says so. They are not
    resolved yet. The command line has the last word."""
    try:
        words = config.flags_in_environment()
    except ValueError as error:
        runtime.refuse(words_refusal(config.FLAGS_VARIABLE, error))
    if words is None or runtime.bookkeeping(server_args) is not None or getattr(server_args, runtime.IS_OFF, False):
        return
    try:
        server_args.page_size = server_args.page_size
    except AttributeError:
        # SGLang has sealed them.
        runtime.refuse(late_refusal(config.FLAGS_VARIABLE))
    parser = argparse.ArgumentParser(prog=config.FLAGS_VARIABLE, allow_abbrev=False)
    after_add_cli_args(None, parser)
    asked = parser.parse_args(words)
    if not asked.enable_banyan:
        runtime.refuse(environment_refusal(config.FLAGS_VARIABLE))
    asked.load_balance_method = server_args.load_balance_method
    asked.disaggregation_mode = server_args.disaggregation_mode
    carried = _turned_on(asked, server_args)
    _carry(server_args, carried)


def _carry(server_args: Any, carried: dict[str, Any] | None) -> None:
    if carried is None:
        setattr(server_args, runtime.IS_OFF, True)
        return
    setattr(server_args, runtime.BOOKKEEPING, carried)
    if runtime.device_of(server_args) == "cpu":
        cpu_engine.start_with(server_args)


def _turned_on(asked: argparse.Namespace, args: Any) -> dict[str, Any] | None:
    """Take Banyan's flags from ``asked`` and set SGLang's in ``args``; what every process is to know, or None where
    SGLang is not the one that Banyan was written against. Refuses what cannot work, and what ends in a fault: a server
    that was to keep tenants apart is not started as another one."""
    try:
        return _turn_on(asked, args)
    except Exception as error:
        logger.exception("banyan: these flags cannot be taken")
        runtime.refuse(fault_refusal(error))


def _turn_on(asked: argparse.Namespace, args: Any) -> dict[str, Any] | None:
    try:
        layout = layout_of(args)
        wanted = _wanted(asked, args, layout)
    except ValueError as error:
        runtime.refuse(str(error))
    reasons = [*refusals(facts(args, wanted, layout)), *mode_refusals(modes(args))] if wanted.shares else []
    if args.tokenizer_worker_num > 1 and config.names_other_http_app(HTTP_WORKER):
        reasons.append(http_app_refusal())
    reasons += [
        *_store_refusals(wanted),
        *_arena_refusals(wanted),
        *_tenant_refusals(wanted, args),
        *features.lines(asked_of(args, wanted, layout)),
    ]
    if reasons:
        runtime.refuse(*reasons)
    off = seams.unfit()
    core = [one for one in off if one.name == features.CORE]
    if core:
        if wanted.tenant_secret_file:
            runtime.refuse(misfit_refusal(core[0].line))
        _refuse_who_needs(core, asked_of(args, wanted, layout))
        logger.warning("banyan: off, SGLang is not the one that it was written against: %s", core[0].line)
        return None
    wanted = _without(off, wanted, asked_of(args, wanted, layout))
    carried = _inject(args, wanted, layout)
    carried["off"] = {one.name: one.reasons for one in off}
    carried["needed"] = features.needed(asked_of(args, wanted, layout))
    return carried


def _wanted(asked: argparse.Namespace, args: Any, layout: Layout) -> Config:
    """
    Raises:
        ValueError: naming the flag that is out of range, or those that do not go together.
    """
    given = config.flags_given(asked)
    wanted = config.take_flags(asked, default_policy=LEVEL_POLICY if layout.steps_together else DEFAULT_POLICY)
    assert wanted is not None
    runtime.log_as_asked(wanted, "main")
    for line in idle_lines(asked_of(args, wanted, layout), given):
        logger.warning("banyan: %s", line)
    return _with_member_slots(wanted, layout)


def _refuse_who_needs(off: Sequence[features.Off], asked: Asked) -> None:
    reasons = features.refusals({one.name: one.reasons for one in off}, asked)
    if reasons:
        runtime.refuse(*reasons)


def _without(off: Sequence[features.Off], wanted: Config, asked: Asked) -> Config:
    """Switch these off, here and in the processes to come; what is wanted of the rest. Refuses who needs them."""
    _refuse_who_needs(off, asked)
    for one in off:
        logger.log(
            logging.WARNING if one.feature.is_used(asked) else logging.INFO,
            "banyan: %s: %s to have it",
            one.line,
            one.way_out,
        )
        wanted = one.feature.without(wanted)
    runtime.switch_off(*(one.name for one in off))
    return wanted


def asked_of(args: Any, wanted: Config, layout: Layout, model: ModelFacts | None = None) -> Asked:
    """What features depend on, of arguments as they were given or as SGLang has resolved them."""
    return Asked(
        config=wanted,
        device=runtime.device_of(args),
        algorithm=_algorithm(args),
        has_adapters=bool(args.lora_paths),
        disaggregation_mode=args.disaggregation_mode,
        steps_together=layout.steps_together,
        model=model,
        layout=layout,
        args=args,
    )


def _algorithm(args: Any) -> str | None:
    """Of speculation. With that flag SGLang captures states as it says, and drops it."""
    return None if args.enable_return_aux_hidden_states else args.speculative_algorithm


def _with_member_slots(wanted: Config, layout: Layout) -> Config:
    """Without the arena that nobody has asked for, where the ranks leave no member slots for it."""
    num_slots = layout.num_slots(has_arena=True)
    needs_arena = wanted.store or wanted.deals_with_nodes or wanted.tenant_share is not None
    if not wanted.sizes_arena or needs_arena or num_slots <= MAX_SLOTS:
        return wanted
    logger.warning("banyan: no host arena: with it the ranks take %d member slots, a node has %d", num_slots, MAX_SLOTS)
    return replace(wanted, host_gb=0.0)


def layout_of(args: Any) -> Layout:
    """The ranks and shards that these arguments, as they were given, make.

    Raises:
        ValueError: naming the flags that do not go together.
    """
    return Layout.of_flags(
        tp_size=args.tp_size,
        dp_size=args.dp_size,
        attn_dp_size=args.attn_dp_size,
        attn_cp_size=args.attn_cp_size,
        enable_dp_attention=args.enable_dp_attention,
        dwdp_size=args.dwdp_size,
        num_nodes=args.nnodes,
        node=args.node_rank,
    )


def _inject(args: Any, wanted: Config, layout: Layout) -> dict[str, Any]:
    """Set what the user left open; the bookkeeping that every process reads."""
    here = [parts for name, parts in features.installed().items() if runtime.is_on(name)]
    for parts in here:
        parts.launched(asked_of(args, wanted, layout))
    carried: dict[str, Any] = {
        "config": wanted,
        "ear": last_words.listen(),
        "tenants": tenant_salts.name_of(wanted.tenant_secret_file),
        "taken": taken_ids.make_file(),
    }
    for parts in here:
        carried |= parts.carried(asked_of(args, wanted, layout))
    if wanted.shares:
        args.enable_unified_cache_external_linker = True
        args.unified_cache_external_linker_backend = "dynamic"
        args.unified_cache_external_linker_config = {
            "linker": "Linker",
            "linker_module_path": "banyan.sglang_plugin.rank.entry",
        }
        carried["rank_table"] = _make_rank_table(layout.num_slots(has_arena=wanted.has_arena))
        carried["layout"] = layout
        carried["server"] = uuid.uuid4().hex
        carried["engine"] = engine_code.engine_name(wanted)
        carried["noted"] = []
    if wanted.tenant_secret_file:
        # It comes by HTTP, to whichever worker, and no router says whose it is: it would end that worker.
        args.skip_server_warmup = True
    if args.tokenizer_worker_num > 1:
        config.serve_in_workers(HTTP_WORKER)
        last_words.hear_of_ends()
    if wanted.policy != config.SGLANG_POLICY and layout.num_nodes > 1 and args.elastic_ep_backend is None:
        args.load_balance_method = HEARS_LOADS
    logger.info("banyan: on, share=%s, %s", wanted.share, layout.words())
    return carried


def _make_rank_table(num_slots: int) -> str:
    """The path of the table at which the ranks meet, and where this process counts its failures."""
    rank_table = _native.RankTable.create(num_slots)
    _rank_tables[rank_table.path] = rank_table
    faults.count_at(rank_table.count_failure)
    return rank_table.path


def _tenant_refusals(wanted: Config, args: Any) -> list[str]:
    """Why tenants cannot be served here."""
    if not wanted.tenant_secret_file:
        return []
    try:
        tenant_salts.name_of(wanted.tenant_secret_file)
    except (OSError, ValueError) as error:
        return [file_refusal(path=wanted.tenant_secret_file, error=error)]
    return tenant_refusals(tenants(args, wanted))


def _arena_refusals(wanted: Config) -> list[str]:
    """What can be said of its size and its folder before the weights are loaded. Writes nothing."""
    if not (wanted.host_bytes and wanted.shares):
        return []
    available_bytes = _native.available_bytes()
    if wanted.keep_host_arena:
        folder = Path(wanted.keep_host_arena) / ARENA_FOLDER
        try:
            nearest = look_at_folder(folder, "--banyan-keep-host-arena")
            kind = type_of(MOUNTS.read_text(), os.path.realpath(nearest))
            kept_bytes = sum(path.stat().st_size for path in folder.glob(PART_FILE.format("*")))
        except (OSError, ValueError) as error:
            return [kept_arena_refusal(folder=wanted.keep_host_arena, error=error)]
        if kind not in ("tmpfs", "unknown"):
            on_a_disk = f"{nearest} does not lie on tmpfs, but on {kind}: a disk would write it out all the time"
            return [kept_arena_refusal(folder=wanted.keep_host_arena, error=on_a_disk)]
        available_bytes = available_bytes and available_bytes + kept_bytes
    if available_bytes is None or wanted.host_bytes <= available_bytes:
        return []
    return [arena_size_refusal(need_bytes=wanted.host_bytes, available_bytes=available_bytes)]


def _store_refusals(wanted: Config) -> list[str]:
    """What the ranks would refuse the store for, of what can be told before there are any."""
    if not (wanted.store and wanted.shares):
        return []
    try:
        location = StoreLocation.parse(wanted.store)
        said = look(location)
        if said:
            logger.info("banyan: the store: %s", said)
    except ValueError as error:
        return [store_refusal(paths=wanted.store, error=error)]
    except OSError as error:
        if location.scheme in (FILE, HF3FS):
            return [store_refusal(paths=wanted.store, error=error)]
        # What serves it may be about to start. The ranks ask again, once they have their weights.
        logger.warning("banyan: the store does not answer yet: %s", error)
    return []


def facts(args: Any, wanted: Config, layout: Layout) -> ServerFacts:
    """What the refusals depend on, of arguments as they were given or as SGLang has resolved them."""
    return _facts_of(
        ServerFacts,
        args,
        sglang_version=importlib.metadata.version("sglang"),
        device=runtime.device_of(args),
        num_member_slots=layout.num_member_slots,
        page_size=args.page_size if args.page_size is not None else config.DEFAULT_PAGE_TOKENS,
        external_linker_backend=(
            args.unified_cache_external_linker_backend if args.enable_unified_cache_external_linker else None
        ),
        expandable_segments=config.uses_expandable_segments(),
        sizes_pool_after_capture=config.sizes_pool_after_capture(),
        sends_early=config.sends_cached_prefixes_early(),
        has_arena=wanted.has_arena,
        knows_weights=wanted.knows_weights,
        draft=_draft(args),
        num_ranks=layout.num_ranks,
        policy=wanted.policy,
        store_admit=wanted.store_admit if wanted.store else "first",
        rust_server=config.uses_rust_server(),
        rust_servicer=(args.smg_grpc_mode or args.grpc_mode) and config.uses_rust_servicer(),
    )


def tenants(args: Any, wanted: Config) -> TenantFacts:
    """What decides whether tenants can be kept apart; of such arguments too."""
    return TenantFacts(
        shares=wanted.shares,
        is_embedding=bool(args.is_embedding),
        speaks_grpc=bool(args.smg_grpc_mode or args.grpc_mode or args.grpc_port or config.names_grpc_port()),
    )


def _draft(args: Any) -> DraftFacts:
    return DraftFacts(
        algorithm=_algorithm(args),
        has_layers_of_steps=args.enable_multi_layer_eagle,
        disaggregation_mode=args.disaggregation_mode,
        skips_draft_extend=config.skips_draft_extend(),
    )


def kinds(args: Any, wanted: Config, layout: Layout, model: ModelFacts) -> KindFacts:
    """What decides whether a model's sliding windows, or its states, can be shared."""
    return KindFacts(
        model=model,
        device=runtime.device_of(args),
        strategy=args.mamba_radix_cache_strategy,
        has_int8_checkpoints=args.enable_int8_mamba_checkpoint,
        replays=args.enable_linear_replayssm or args.enable_linear_replayssm_spec,
        prefill_graphs=args.cuda_graph_config.prefill.backend,
        captures_states=config.captures_states(),
        algorithm=_algorithm(args),
        disaggregation_mode=args.disaggregation_mode,
        is_context_parallel=modes(args).is_context_parallel,
        deals_with_nodes=wanted.deals_with_nodes,
        keeps_arena=bool(wanted.keep_host_arena),
        asked_store=asked_scheme(wanted),
        num_slots=layout.num_slots_with_windows,
    )


def reserve_window_slots(carried: dict[str, Any]) -> None:
    """The model keeps its windows, or states, apart: the ranks meet at a rank table with slots for these too. No rank
    has been started yet."""
    small = carried["rank_table"]
    if small not in _rank_tables:
        # Another process than the one that made it.
        return
    carried["rank_table"] = _make_rank_table(carried["layout"].num_slots_with_windows)
    del _rank_tables[small]


def modes(args: Any) -> ModeFacts:
    """How the server was asked to serve; of such arguments too."""
    return _facts_of(
        ModeFacts,
        args,
        divides_kv=args.enable_dsa_cache_layer_split or args.enable_kv_cache_sharding,
        algorithm=_algorithm(args),
    )


def _facts_of(facts: type[F], args: Any, **others: Any) -> F:
    """What ``args`` say under the names of ``facts``, and ``others``."""
    names = {one.name for one in fields(cast(Any, facts))} - others.keys()
    return facts(**others, **{name: getattr(args, name) for name in names})
