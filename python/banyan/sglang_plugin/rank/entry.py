# SPDX-License-Identifier: Apache-2.0
"""What SGLang builds as its cache's linker: Banyan's, or none to speak of where Banyan cannot be built.

A refusal ends the server: it is for what the user has asked for. A fault of Banyan's does not: its rank then computes
what it has to, as stock SGLang. But for a rank of several processes, its shards: they must take every branch alike, and
one of them that has no Banyan would not.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from banyan import faults
from banyan.refusals.start import shard_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import own_slots
from banyan.sglang_plugin.rank.linker import BanyanLinker
from banyan.sglang_plugin.rank.shards import Shards


class FailedBefore(RuntimeError):
    """A hook of this process has failed while its pools were made."""


class Linker(UnifiedCacheLinker):
    """Knows no pages and takes none. Building it gives a ``BanyanLinker``, where that can be built."""

    def __new__(cls, server_args: Any, params: Any, **kwargs: Any) -> Any:
        try:
            # First of all: every process of the TP group takes part in it.
            own_slots.agree_on_server(server_args)
            if faults.counts():
                raise FailedBefore(", ".join(faults.counts()))
            return BanyanLinker(server_args, params, **kwargs)
        except Exception as error:  # noqa: BLE001 - note() raises a refusal again
            faults.note("linker", error, consequence="this process cannot share")
            if not Shards(params).is_one:
                runtime.refuse(shard_refusal(error))
            runtime.turn_off()
            return super().__new__(cls)

    def __init__(self, server_args: Any, params: Any, **kwargs: Any) -> None:
        self.pools: dict[Any, object] = {}
        self.layer_done_counter = LayerWiseLoadCounter(0)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        return False

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        return False

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass
