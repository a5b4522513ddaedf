# SPDX-License-Identifier: Apache-2.0
"""Where a request goes: what the ranks hold, how busy they are, and Banyan's policy on both. Dispatcher process only.

The decision travels as ``routed_dp_rank``, SGLang's own way to name a rank, so that its dispatcher still sends, and
still refuses ranks that are not active. A request that a client has pinned keeps its rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from banyan import _native
from banyan.routing import POLICIES, Dispatcher, LoadReport, Policy, PrefixHint, Prompt, hint
from banyan.routing.hint import Decision
from banyan.sglang_plugin.kv_hints import payload_of, with_action
from banyan.sglang_plugin.page_hash import namespace_seed

logger = logging.getLogger("banyan")

CHUNK_PAGES = 32
LEAST_REMEMBERED_CHUNKS, MOST_REMEMBERED_CHUNKS = 1 << 14, 1 << 18
"""At 16 tokens a page 50 MB and 8 M tokens of prompts, 800 MB and 134 M."""


def num_remembered_chunks(num_frames: int) -> int:
    """How many chunks of hashed prompts to remember: room for twice the pages that all ranks can hold, so that what is
    held is hardly ever hashed anew, which for 2,000 pages would take 0.2 ms.
    """
    wanted = 2 * num_frames // CHUNK_PAGES
    return min(max(1 << wanted.bit_length(), LEAST_REMEMBERED_CHUNKS), MOST_REMEMBERED_CHUNKS)


@dataclass(frozen=True, slots=True)
class Found:
    """Leading tokens of a prompt that each rank holds, and that a rank without them can get from others."""

    tokens_by_rank: tuple[int, ...] = ()
    fetchable_tokens: int = 0


class PrefixScout:
    """Tells, for a prompt, how long a prefix each rank holds. It reads the directory and leases nothing.

    The roster seats the shards of all ranks first, then, where there is a host arena, their parts of it.
    """

    def __init__(
        self, roster: _native.Roster, *, num_ranks: int, tp_size: int, page_tokens: int, fetches: bool
    ) -> None:
        self._roster = roster
        self._num_shards = num_ranks * tp_size
        self._fetches = fetches
        self._tp_size = tp_size
        self._page_tokens = page_tokens
        self._page_keys: _native.PageKeys | None = None
        self._met: tuple[_native.Peers, _native.PageKeys] | None = None
        self._namespace = ""
        self._found_nothing = False

    def look_up(self, req: Any) -> Found:
        """What is held of the prompt; nothing when the tokens do not tell, or before the ranks have met.

        The last token is never counted: a rank computes it to have something to sample from.
        """
        met = self._meet()
        # What an image or an embedding becomes is not in these tokens.
        if met is None or not req.input_ids or req.mm_inputs is not None or req.input_embeds is not None:
            return Found()
        peers, page_keys = met
        num_pages = (len(req.input_ids) - 1) // self._page_tokens
        # Prompts of a LoRA adapter hash under its id, as the rank's own request does.
        extra_key = (req.extra_key or "") + req.lora_id if req.lora_id is not None else req.extra_key
        seed = namespace_seed(extra_key, req.cache_salt)
        pages_by_slot = peers.prefix_lens_of(page_keys, seed, req.input_ids[: num_pages * self._page_tokens])
        self._found_nothing = not any(pages_by_slot)
        pools, arenas = pages_by_slot[: self._num_shards], pages_by_slot[self._num_shards :]
        most_fetchable = max([*(pools if self._fetches else ()), *arenas], default=0)
        return Found(
            tuple(num * self._page_tokens for num in pools[:: self._tp_size]), most_fetchable * self._page_tokens
        )

    def _meet(self) -> tuple[_native.Peers, _native.PageKeys] | None:
        """The ranks. They are looked for again after a prompt of which nobody held anything: new weights are a new
        namespace, and nothing is found under the old one.
        """
        if self._met is None or self._found_nothing:
            ranks = [member for member in self._roster.members() if member["alive"]]
            if ranks and ranks[0]["namespace"] != self._namespace:
                self._namespace = ranks[0]["namespace"]
                if self._page_keys is None:
                    num_chunks = num_remembered_chunks(sum(member["num_frames"] for member in ranks))
                    self._page_keys = _native.PageKeys(self._page_tokens, num_chunks)
                peers = _native.Peers(self._roster, None, 0, bytes.fromhex(self._namespace), [], None)
                self._met = (peers, self._page_keys)
        return self._met


class Placer:
    """Gives every generation request a hint and, unless SGLang is to choose, a rank.

    ``dispatcher`` is None when SGLang's own method chooses. ``read_snapshots`` gives SGLang's load snapshots.
    """

    def __init__(
        self,
        scout: PrefixScout,
        dispatcher: Dispatcher | None,
        *,
        policy_name: str,
        read_snapshots: Callable[[], Sequence[Any]],
    ) -> None:
        self._scout = scout
        self._dispatcher = dispatcher
        self._policy_name = policy_name
        self._read_snapshots = read_snapshots
        self._named: dict[str, Policy] = {}

    def place(self, req: Any, active: Collection[int]) -> None:
        """Set ``routed_dp_rank`` and add the hint to ``kv_hints``.

        Raises:
            NoActiveRank: when there is nobody to choose; the request is as it was.
            ValueError: when the request names a policy that does not exist, or holds tokens beyond 32 bits.
        """
        start_ns = time.perf_counter_ns()
        found = self._scout.look_up(req)
        decision = None
        if self._dispatcher is not None:
            decision = self._decide(self._dispatcher, req, found, active, start_ns)
        if found.tokens_by_rank or decision is not None:
            add_hint(req, PrefixHint.from_tokens_by_rank(found.tokens_by_rank, decision))

    def _decide(
        self, dispatcher: Dispatcher, req: Any, found: Found, active: Collection[int], start_ns: int
    ) -> Decision | None:
        name = wished_policy(req) or self._policy_name
        prompt = Prompt(
            num_tokens=len(req.input_ids or ()),
            cached_tokens=found.tokens_by_rank,
            fetchable_tokens=found.fetchable_tokens,
            session=session_of(req),
        )
        for snapshot in self._read_snapshots():
            dispatcher.reported(snapshot.dp_rank, report_of(snapshot))
        # The clock of the snapshots.
        now_s = time.time()
        if req.routed_dp_rank is not None:
            if req.routed_dp_rank in active:
                dispatcher.count(prompt, req.routed_dp_rank, now_s)
            return None
        choice = dispatcher.place(prompt, active, now_s, policy=self._policy(name))
        req.routed_dp_rank = choice.rank
        elapsed_us = (time.perf_counter_ns() - start_ns) // 1000
        return Decision(name, choice.reason.value, len(choice.hot_ranks), elapsed_us)

    def _policy(self, name: str) -> Policy | None:
        """The policy of that name; None for the dispatcher's own."""
        if name == self._policy_name:
            return None
        if name not in self._named:
            if name not in POLICIES:
                raise ValueError(f"policy {name!r} is none of {', '.join(POLICIES)}")
            self._named[name] = POLICIES[name]()
        return self._named[name]


def report_of(snapshot: Any) -> LoadReport:
    """SGLang's load snapshot in Banyan's words."""
    return LoadReport(
        taken_s=snapshot.timestamp,
        num_running=snapshot.num_running_reqs,
        num_waiting=snapshot.num_waiting_reqs,
        pending_prefill_tokens=snapshot.num_waiting_uncached_tokens,
        ongoing_tokens=snapshot.num_total_tokens,
        free_tokens=max(0, snapshot.max_total_num_tokens - snapshot.num_used_tokens),
        total_prefill_tokens=snapshot.total_prefill_uncached_tokens,
        total_prefill_us=snapshot.total_prefill_busy_us,
    )


def session_of(req: Any) -> str | None:
    """What names the conversation: SGLang's session, else the routing key (header ``x-smg-routing-key``)."""
    if req.session_id is not None:
        return str(req.session_id)
    if req.session_params is not None and req.session_params.id is not None:
        return str(req.session_params.id)
    return str(req.routing_key) if req.routing_key is not None else None


def wished_policy(req: Any) -> str | None:
    """The policy that the client names for this request."""
    payload = payload_of(req.kv_hints, hint.POLICY_ACTION, hint.ACTION_VERSION)
    return None if payload is None else str(payload.get("policy"))


def add_hint(req: Any, seen: PrefixHint) -> None:
    """Add the hint to what the client may have sent."""
    req.kv_hints = with_action(
        req.kv_hints,
        action_id=f"banyan-{req.rid}",
        action_type=hint.ACTION_TYPE,
        action_version=hint.ACTION_VERSION,
        payload=seen.payload(),
    )


class FailureLog:
    """Says that something went wrong once, then at every tenfold number of times."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_failures = 0
        self._next_said = 1

    def note(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= self._next_said:
            self._next_said *= 10
            logger.warning("%s (%d so far): %s: %s", self._what, self._num_failures, type(error).__name__, error)
