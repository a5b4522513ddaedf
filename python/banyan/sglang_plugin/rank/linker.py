# SPDX-License-Identifier: Apache-2.0
"""SGLang's external linker, served by the other ranks' pools.

SGLang drives: ``lookup`` and ``load`` while it builds a batch, ``start`` before the forward, a wait at every layer's
first KV read, ``finish`` after the forward, ``offload`` when pages enter its radix tree. This class only translates:
``assemble`` has put the rank together, and the decisions are in ``banyan.cache``. Everything runs on the scheduler
thread.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from banyan import faults
from banyan.cache import LOST, Wanted
from banyan.sglang_plugin import seams
from banyan.sglang_plugin.rank import requests, times
from banyan.sglang_plugin.rank.assemble import assemble
from banyan.sglang_plugin.rank.one_rank import Rank
from banyan.sglang_plugin.rank.reporting import report

ENTRIES = (
    "arrive",
    "lookup",
    "load",
    "start_layer_wise_loading",
    "cancel_queued_load",
    "offload",
    "num_completed_offloads",
    "take_events",
)
"""Where SGLang calls in, but for the waits for data: what Banyan costs the scheduler thread."""

_installed: BanyanLinker | None = None


def installed() -> Rank:
    """The rank of this process.

    Raises:
        RuntimeError: when SGLang has not built its linker.
    """
    if _installed is None:
        raise RuntimeError("SGLang has not built Banyan's linker in this process")
    return _installed


class BanyanLinker(Rank, UnifiedCacheLinker):
    """One rank's connection to its peers. Built by SGLang once for each worker process."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        global _installed
        seams.verify("scheduler")
        self.forward_stream = forward_stream
        parts = assemble(
            server_args,
            params,
            components,
            forward_stream=forward_stream,
            record_ready=self.record_offload_ready,
        )
        self.pools: dict[Any, object] = {kind.sglang_name: kind.pool for kind in parts.pools.kinds}
        self._queued: dict[str, str] = {}
        self._num_passed_over = 0
        times.time_control(self, "linker", ENTRIES)
        super().__init__(parts)
        report.start(
            self,
            # What a decode server tells of prompts its prefill server has found, and counted.
            counts_prompts=getattr(server_args, "disaggregation_mode", "null") != "decode",
            enable_metrics=server_args.enable_metrics,
            labels=self._labels(),
        )
        self._cannot_raise()
        _installed = self

    def _cannot_raise(self) -> None:
        """What SGLang calls of this object, and what it gets where that fails."""
        for name, otherwise, stops in (
            ("lookup", lambda rid, transfers: [], False),
            ("load", lambda rid, transfers: not self.cancel_queued_load(rid) and False, True),
            ("cancel_queued_load", lambda rid: True, True),
            ("start_layer_wise_loading", lambda: LOST, True),
            ("finish_layer_wise_loading", lambda index: False, True),
            ("offload", lambda transfers, session_id=None: self._pass_over(), True),
            ("num_completed_offloads", lambda: self._num_told, False),
            ("pop_completed_offload", lambda: False, False),
            ("reset", lambda: None, True),
            ("close", lambda: None, True),
        ):
            method = getattr(self, name)
            setattr(self, name, faults.quiet(method, f"linker.{name}", otherwise, stops=stops))
        faults.hush(self, "_poll_tiers", "arrive", "offer_again", "_forget_gone", "_wanted")
        faults.hush(self, "_judge_answers", "_note_answer")
        faults.stop_with(self.stop)
        faults.count_at(self.kinds.full.count_failure)

    # ---- match and lease ---------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefix lengths of the tail, in pages, that the peers can supply."""
        keys, began_ns = transfers[0].keys, time.time_ns()
        request = requests.facts(requests.id_of_rid(rid), self.page_tokens)
        offer = self.cache.prepare(request, keys)
        requests.record_span(request.id, request.span(len(keys), offer))
        num_pages = self._planner.num_pages(request, len(keys), offer)
        self._planner.spans.looked_up(request.id, began_ns, offer, num_pages)
        if num_pages == 0:
            return []
        # One rank alone takes the longest. The shards of a tensor-parallel rank intersect their answers.
        lengths = self.cache.lengths(keys, num_pages)
        return list(islice(lengths, 1) if self.is_whole_rank else lengths)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Lease the promised pages for the freshly allocated slots; False makes SGLang compute them."""
        request = requests.id_of_rid(rid)
        wanted = self._wanted(transfers)
        if wanted is None:
            # The other shards wait for this one's answer.
            self.cache.refuse(request)
            return False
        full, *beside = wanted
        fetch = self.cache.admit(request, *full, *beside)
        if fetch is None:
            return False
        self._queued[rid] = request
        requests.record_fetch(fetch)
        return True

    def _wanted(self, transfers: list[Any]) -> list[Wanted] | None:
        """The pages of each kind with the places that SGLang has allocated for them; None where that fails."""
        full, *beside = transfers
        kinds = zip(self.kinds.beside, beside, strict=False)
        return [
            (full.keys, self._access.frames(full.device_indices)),
            *(kind.wanted(part.keys, part.device_indices) for kind, part in kinds),
        ]

    def cancel_queued_load(self, rid: str) -> bool:
        # What was admitted under this name, whoever has it now.
        return self.cache.cancel(self._queued.pop(rid, ""))

    # ---- move --------------------------------------------------------------------------------------------------

    def start_layer_wise_loading(self) -> int:
        self._queued.clear()
        if self.writes_back is not None:
            # What has gone down for this batch is found while its forward runs.
            self._poll_tiers()
        return self.cache.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.cache.finish(counter_index)

    # ---- publish -----------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Pages have entered SGLang's tree: offer them once they are complete."""
        if self.cache.is_stopped:
            return self._pass_over()
        full, *beside = transfers
        return self._offload(full, beside) or self._pass_over()

    def _pass_over(self) -> bool:
        """This node is not published. SGLang has the shards of a rank go on with their nodes together: it waits for
        this one as well where there are others."""
        if self.is_whole_rank:
            return False
        # In the order of the nodes: what was on its way before is not published either.
        self._access.give_up_offloads()
        self._num_passed_over += 1
        return True

    def num_completed_offloads(self) -> int:
        # SGLang asks on every scheduling step.
        self._poll()
        report.tick()
        return self._num_told

    @property
    def _num_told(self) -> int:
        return self._access.num_completed + self._num_passed_over

    def pop_completed_offload(self) -> bool:
        if self._access.num_completed:
            return self._access.pop_completed()
        self._num_passed_over -= 1
        return False

    # ---- life --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._num_passed_over = 0
        self._empty()

    def close(self) -> None:
        self._close()

    def _labels(self) -> dict[str, str]:
        return {"dp_rank": str(self.kinds.full.member_slots.dp_rank), "tp_rank": str(get_parallel().tp_rank)}
