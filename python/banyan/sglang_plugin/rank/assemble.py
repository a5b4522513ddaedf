# SPDX-License-Identifier: Apache-2.0
"""How a rank is put together: the only place that knows all of its parts.

SGLang builds a rank's linker once in each worker process, when the pools are there. From the bottom up: the kinds of
pages, what plans and caches, what measures, what publishes and tells.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from banyan import faults
from banyan.cache import PrefixCache
from banyan.pacing.write_pause import WritePause
from banyan.planner.answer_reuse import Answers
from banyan.sglang_plugin import page_hash, runtime
from banyan.sglang_plugin.pools.choose import open_device
from banyan.sglang_plugin.pools.kind_pools import RankPools
from banyan.sglang_plugin.rank import points, requests, times
from banyan.sglang_plugin.rank.all_kinds import Kinds
from banyan.sglang_plugin.rank.evicting.node_demand import NodeDemand
from banyan.sglang_plugin.rank.kind import RankSetup, most_chunk_tokens
from banyan.sglang_plugin.rank.layer_wait import LayerWait
from banyan.sglang_plugin.rank.one_rank import RankParts
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.publication import Publication
from banyan.sglang_plugin.rank.reporting.arena_events import events_for
from banyan.sglang_plugin.rank.reporting.line_report import LineReport
from banyan.sglang_plugin.rank.shards import Shards
from banyan.telemetry import Counters, Dropped, LayerClock, NodeReuse

logger = logging.getLogger("banyan")


def assemble(
    server_args: Any,
    params: Any,
    components: set[Any],
    *,
    forward_stream: Any,
    record_ready: Callable[[], list[Any]],
) -> RankParts:
    """``params`` and ``components`` are those of SGLang's tree. Refuses what Banyan does not know how to share."""
    began_s = time.monotonic()
    registered = points.of_features()
    pools = registered.take_apart(components, params)
    if params.disable:
        logger.warning("banyan: SGLang keeps no radix cache for this model: nothing will be shared")
    page_hash.prepare(params.page_size)
    config, carried = runtime.config(), runtime.bookkeeping(server_args)
    assert config is not None and carried is not None
    setup = RankSetup(
        server_args=server_args,
        config=config,
        carried=carried,
        device=open_device(config, [kind.pool for kind in pools.kinds]),
        page_tokens=params.page_size,
        forward_stream=forward_stream,
        record_ready=record_ready,
        counters=Counters(),
        answers=Answers(),
        arena_events=events_for(params, has_windows=len(pools.kinds) > 1),
        points=registered,
    )
    shards, kinds, dropped = Shards(params), Kinds(pools.kinds, setup), Dropped()
    planner = _make_planner(setup, kinds, pools)
    cache = _make_cache(setup, kinds, planner, shards)
    # No client can choose prompts that the sample likes.
    reuse = NodeReuse(setup.page_tokens, sum(kinds.node_pages), secrets.randbits(64), time.monotonic)
    demand = NodeDemand(cache if kinds.full.member_slots.peers else None, kinds.node_pages[0], setup.counters, reuse)
    layer_wait = _keep_time(cache, planner, kinds, pools, setup, shards)
    # Before anybody keeps one of these methods.
    times.time_control(cache, "cache", ("retire", "drain"))
    requests.look_ahead(carried["tokens_ahead"])
    publication = Publication(cache, kinds, setup.page_tokens)
    kinds.full.access.attach(publication.publish)
    kinds.guard(cache)
    return RankParts(
        setup=setup,
        pools=pools,
        shards=shards,
        kinds=kinds,
        planner=planner,
        cache=cache,
        publication=publication,
        layer_wait=layer_wait,
        demand=demand,
        dropped=dropped,
        lines=LineReport(setup.counters, setup.page_tokens, tells_text=config.tells_lines),
        reuse=reuse,
        began_s=began_s,
    )


def _make_planner(setup: RankSetup, kinds: Kinds, pools: RankPools) -> RankPlanner:
    planner = RankPlanner(
        num_layers=pools.num_layers,
        page_tokens=setup.page_tokens,
        min_pages=-(-setup.config.min_fetch_tokens // setup.page_tokens),
        num_in_step=kinds.full.member_slots.layout.attn_dp,
        fixed_tokens=kinds.fixed_tokens,
        num_kinds=1 + len(kinds.beside),
        chunk_tokens=most_chunk_tokens(),
    )
    faults.hush(planner, "became", "refused", "started", "moved", "forward_begins", "forward_ended", "forward_took")
    faults.hush(planner, "was_read", "step_begins")
    return planner


def _make_cache(setup: RankSetup, kinds: Kinds, planner: RankPlanner, shards: Shards) -> PrefixCache:
    return PrefixCache(
        member_slots=kinds.full.member_slots,
        page_tokens=setup.page_tokens,
        full=kinds.full.pages,
        beside=[kind.pages for kind in kinds.beside],
        planner=planner,
        agreed=shards.all,
        counters=setup.counters,
    )


def _keep_time(
    cache: PrefixCache,
    planner: RankPlanner,
    kinds: Kinds,
    pools: RankPools,
    setup: RankSetup,
    shards: Shards,
) -> LayerWait:
    full = kinds.full
    allocators = [kind.pools.allocator for kind in kinds]
    times.allocate_without_circles(cache, shards, allocators)
    if full.member_slots.layout.steps_together:
        # As if every token had all that a page of either kind has of it.
        token_bytes = sum(kind.block.block_bytes for kind in kinds) // setup.page_tokens
        times.step_together(allocators, planner, token_bytes=token_bytes, is_whole_rank=shards.is_one)
    planner.writes = WritePause(*(kind.store for kind in kinds if kind.store is not None))
    timer = full.access.time_layers(pools.num_layers, planner.forward_took)
    clock = LayerClock(
        num_layers=pools.num_layers,
        counters=setup.counters,
        clock=time.perf_counter_ns,
        # Where the device has a clock of its own, the ticks are launches: what they time is no lesson.
        ended=planner.forward_ended if timer is None else None,
    )
    # A draft's layers lie behind the model's in a page.
    num_page_layers = pools.num_layers if kinds.beside else len(full.block.layer_bytes)
    layer_wait = LayerWait(cache, clock, planner, pools.num_layers, num_page_layers, timer)
    for waiting in pools.waiting:
        # SGLang tells the pool of keys and values alone whom to wait for.
        waiting.register_layer_transfer_counter(layer_wait)
    return layer_wait
