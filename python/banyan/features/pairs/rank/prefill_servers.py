# SPDX-License-Identifier: Apache-2.0
"""What a decode server hears at a bootstrap address, checked: anybody may answer there, and SGLang reckons with all of
it on the scheduler's thread.

Who says what cannot be has no place in SGLang's table, and its requests fail.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

from banyan.features.pairs.rank.control_port import MAX_PEERS
from banyan.features.pairs.unanswered import Unanswered
from banyan.sglang_plugin import runtime

logger = logging.getLogger("banyan")

MAX_TEXT = 1024
MAX_WHY = 500
"""Letters of a reason that another server has had a part in."""

QUESTION = "http://{}/route?prefill_dp_rank={}&prefill_cp_rank={}&target_tp_rank={}&target_pp_rank={}"
"""Where a rank listens, as SGLang asks it."""

HEARTBEAT_S = (2.0, 3.0)
"""To connect and to read, as SGLang's heartbeat waits."""

_RANKS_OF_ROOMS = Unanswered(time.monotonic)
"""SGLang asks for them without a manager."""


def check(info: Any) -> None:
    """Whether a prefill server may say so of itself.

    Raises:
        ValueError: where it has no ranks, more than ``MAX_PEERS``, or no text where there is to be one.
    """
    sizes = {name: getattr(info, name) for name in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size")}
    if min(sizes.values()) < 1 or math.prod(sizes.values()) > MAX_PEERS:
        raise ValueError(f"it says that its sizes are {sizes}")
    for text in (info.kv_layout, info.decode_allocation_policy):
        if text is not None and not (isinstance(text, str) and len(text) <= MAX_TEXT):
            raise ValueError("it names its layout by what is no text")


class PrefillTable:
    """In front of SGLang's manager: which prefill servers a decode server knows."""

    prefill_info_table: dict[str, Any]
    session_pool: Any
    unanswered: Unanswered
    first_rows: dict[str, tuple[str, dict[str, Any]]]
    """Of each of these servers: how to ask it for the first row that it gave, and that row."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether that prefill server is known. One that does not fit never is: its requests fail, where in SGLang the
        decode server ends."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        ensure = functools.partial(super().try_ensure_parallel_info, bootstrap_addr)  # type: ignore[misc]
        try:
            return bool(self.unanswered.ask(bootstrap_addr, ensure, False))
        except Exception as error:  # noqa: BLE001 - said in the log
            _say_misfit(bootstrap_addr, str(error)[:MAX_WHY] or repr(error))
            return False

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """SGLang's thread of heartbeats has found somebody at that address. Where it is a server that has started anew,
        nobody listens any more where its requests were sent, and where SGLang would send the next ones."""
        super()._on_heartbeat_success(bootstrap_addr)  # type: ignore[misc]
        asked = self.first_rows.get(bootstrap_addr)
        if asked is None:
            return
        question, row = asked
        answer = self.session_pool[bootstrap_addr].get(question, timeout=HEARTBEAT_S)
        # Until all of its ranks are there it has no row.
        if answer.status_code != 200 or _listener(answer.json()) != _listener(row):
            self._handle_node_failure(bootstrap_addr)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        self.first_rows.pop(failed_bootstrap_addr, None)
        super()._handle_node_failure(failed_bootstrap_addr)  # type: ignore[misc]

    def _resolve_rank_mapping(self, info: Any) -> None:
        """SGLang reckons with what it has read, and enters it into its table then."""
        check(info)
        super()._resolve_rank_mapping(info)  # type: ignore[misc]


@functools.lru_cache(MAX_PEERS)
def _say_misfit(prefill_server: str, why: str) -> None:
    logger.error("banyan: the prefill server at %s does not fit: its requests fail: %s", prefill_server, why)


class PrefillReceiver:
    """In front of SGLang's receiver of one request: what cannot be read of where the prefill server's ranks listen
    fails this request, where in SGLang the decode server ends."""

    def init(self, prefill_dp_rank: int) -> None:
        """It is known which server's rank will send."""
        receiver: Any = self
        try:
            super().init(prefill_dp_rank)  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - said, and the request fails
            why = f"the prefill server at {receiver.bootstrap_addr} cannot be reached: {error!r}"[:MAX_TEXT]
            logger.error("banyan: %s", why)
            # An abort would tell the same rows.
            receiver.bootstrap_infos = None
            receiver.invalidate_cached_bootstrap_infos()
            receiver.kv_mgr.record_failure(receiver.bootstrap_room, why)
            receiver.kv_mgr.update_status(receiver.bootstrap_room, KVPoll.Failed)
            receiver.conclude_state = KVPoll.Failed

    def _get_bootstrap_info_from_server(self, *rank: int) -> dict[str, Any] | None:
        """SGLang asks here where a rank listens, once. What it knows of the server may be of one that was there before,
        of which it learns by missed heartbeats alone: this request fails then, and the next one knows."""
        receiver: Any = self
        ask = functools.partial(super()._get_bootstrap_info_from_server, *rank)  # type: ignore[misc]
        row: dict[str, Any] | None = receiver.kv_mgr.unanswered.ask(receiver.bootstrap_addr, ask, None)
        if row is None or not _is_the_same(receiver.kv_mgr, receiver.bootstrap_addr):
            return None
        question = QUESTION.format(receiver.bootstrap_addr, *rank)
        receiver.kv_mgr.first_rows.setdefault(receiver.bootstrap_addr, (question, row))
        return row


def _listener(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("rank_ip"), row.get("rank_port")


def _is_the_same(manager: Any, prefill_server: str) -> bool:
    """Whether the server at that address still says of itself what it said; what it says now is known from now on."""
    table = manager.prefill_info_table
    known = table.pop(prefill_server, None)
    if manager.try_ensure_parallel_info(prefill_server):
        return bool(table.get(prefill_server) == known)
    if known is not None:
        # Heartbeats go on, for the requests that are under way.
        table.setdefault(prefill_server, known)
    return False


def around_query_prefill_dp_ranks(
    original: Callable[..., Any], bootstrap_addr: str, bootstrap_rooms: Sequence[int]
) -> Any:
    """SGLang asks which rank has each of these rooms; those that are said to have no rank are asked for again."""
    if runtime.config() is None:
        return original(bootstrap_addr, bootstrap_rooms)
    ask = functools.partial(original, bootstrap_addr, bootstrap_rooms)
    said: Any = _RANKS_OF_ROOMS.ask(bootstrap_addr, ask, {})
    asked = {str(room) for room in bootstrap_rooms}
    ranks = said.items() if isinstance(said, dict) else ()
    return {room: rank for room, rank in ranks if room in asked and type(rank) is int and 0 <= rank < MAX_PEERS}
