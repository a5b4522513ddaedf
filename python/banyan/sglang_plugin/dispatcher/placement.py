# SPDX-License-Identifier: Apache-2.0
"""Where a request goes: what the ranks hold, how busy they are, and Banyan's policy on both. Dispatcher process only.

The decision travels as ``routed_dp_rank``, SGLang's own way to name a rank, so that its dispatcher still sends, and
still refuses ranks that are not active. A request that a client has pinned keeps its rank. So does SGLang's session:
each rank knows the turns that it was sent itself, and would take a later one for the first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from banyan.routing import (
    POLICIES,
    Choice,
    Dispatcher,
    Policy,
    PrefixHint,
    Prompt,
    Reason,
    Wait,
    hint,
    report_of,
)
from banyan.routing.hint import Decision
from banyan.sglang_plugin.dispatcher.prefix_probe import Found, PrefixProbe
from banyan.sglang_plugin.kv_hints import payload_of, session_of, with_action


class Placer:
    """Gives every generation request a hint and a rank.

    ``read_snapshots`` gives SGLang's load snapshots. Ranks that are ``silent`` get no prompt that may go elsewhere,
    unless all are; those for vectors are placed by SGLang.
    """

    def __init__(
        self,
        probe: PrefixProbe,
        dispatcher: Dispatcher,
        *,
        policy_name: str,
        read_snapshots: Callable[[], Sequence[Any]],
    ) -> None:
        self._probe = probe
        self._dispatcher = dispatcher
        self._policy_name = policy_name
        self._read_snapshots = read_snapshots
        self._named: dict[str, Policy] = {}
        self._num_checks = 0
        self._taken: dict[int, tuple[float, float]] = {}
        """Of each rank's latest snapshot its own stamp, and when it was taken."""
        self.silent: Set[int] = frozenset()

    def heard(self, active: Collection[int]) -> Collection[int]:
        """Those to choose from."""
        return [rank for rank in active if rank not in self.silent] or active

    def place_check(self, check: Any, active: Sequence[int]) -> None:
        """Name the rank of a check of the server's health, each in turn as SGLang does, and count it: also of a rank
        that nobody asks for anything else it is known whether it stands still."""
        if not active:
            return
        check.routed_dp_rank = active[self._num_checks % len(active)]
        self._num_checks += 1
        self._dispatcher.count(Prompt(1), check.routed_dp_rank, time.monotonic())

    def place(self, req: Any, active: Collection[int]) -> Wait | None:
        """Set ``routed_dp_rank`` and add the hint to ``kv_hints``; or leave both and return what it is to wait for.

        Raises:
            NoActiveRank: when there is nobody to choose; the request is as it was.
            ValueError: when the request names a policy that does not exist, or holds a negative token.
        """
        start_ns = time.perf_counter_ns()
        found = self._probe.look_up(req)
        self.read_loads()
        policy_name = self._wished(req)
        wait = self._wait(req, found, active, policy_name)
        if wait is None:
            self._choose(req, found, active, policy_name, start_ns)
        return wait

    def place_anew(self, req: Any, active: Collection[int], *, held_us: int = 0, held_until: str = "") -> None:
        """As ``place``, for a request that was held back: it is not held back again. Raises the same."""
        start_ns = time.perf_counter_ns()
        found = self._probe.look_up(req)
        self.read_loads()
        self._choose(req, found, active, self._wished(req), start_ns, held_us=held_us, held_until=held_until)

    def look_up(self, req: Any) -> Found:
        """What the ranks hold of its prompt now."""
        return self._probe.look_up(req)

    def read_loads(self) -> None:
        """Take what the ranks have said since: what follows goes by it."""
        unused_tokens = self._probe.unused_tokens(time.monotonic())
        # A rank that says nothing has no more room than the others: it would draw all that is new.
        least = min(unused_tokens.values(), default=None)
        for snapshot in self._read_snapshots():
            unused = _unused(snapshot, unused_tokens.get(snapshot.dp_rank, least))
            self._dispatcher.reported(snapshot.dp_rank, report_of(snapshot, self._taken_s(snapshot), unused))
            self._probe.has_room_for(snapshot.dp_rank, snapshot.max_total_num_tokens)
        for rank, num_tokens in self._probe.read_queue_tokens().items():
            self._dispatcher.waits_for_reads(rank, num_tokens)

    def unheard_s(self, now_s: float, active: Collection[int]) -> dict[int, float]:
        """By active rank, for how long something sent there is in none of its reports."""
        self._dispatcher.forget_all_but(active)
        # Also where nothing was sent: of ranks on other nodes /v1/loads knows what is read here.
        self.read_loads()
        return self._dispatcher.unheard_s(now_s)

    def is_coming(self, req: Any, found: Found, wait: Wait) -> bool:
        """Whether the rank has still to compute what the request waits for, as far as was read."""
        return self._dispatcher.is_pending(_prompt_of(req, found, None), wait)

    def _wait(self, req: Any, found: Found, active: Collection[int], policy_name: str) -> Wait | None:
        if not self._probe.fetches or req.routed_dp_rank is not None or self._probe.layout.steps_together:
            return None
        if _session_rank(req, active) is not None:
            return None
        prompt = _prompt_of(req, found, session_of(req))
        return self._dispatcher.wait(prompt, self.heard(active), time.monotonic(), policy=self._policy(policy_name))

    def _choose(
        self,
        req: Any,
        found: Found,
        active: Collection[int],
        policy_name: str,
        start_ns: int,
        *,
        held_us: int = 0,
        held_until: str = "",
    ) -> None:
        """Have the policy name the rank, unless the client has; and add the hint."""
        prompt = _prompt_of(req, found, session_of(req))
        now_s = time.monotonic()
        decision = None
        if req.routed_dp_rank is None:
            home = _session_rank(req, active)
            if home is None:
                choice = self._dispatcher.place(prompt, self.heard(active), now_s, policy=self._policy(policy_name))
            else:
                self._dispatcher.count(prompt, home, now_s)
                choice = Choice(home, Reason.SESSION)
            req.routed_dp_rank = choice.rank
            elapsed_us = (time.perf_counter_ns() - start_ns) // 1000
            num_hot = len(choice.hot_ranks)
            decision = Decision(policy_name, choice.reason, num_hot, elapsed_us, held_us, held_until)
        elif req.routed_dp_rank in active:
            self._dispatcher.count(prompt, req.routed_dp_rank, now_s)
        self._probe.sent(req.routed_dp_rank, found)
        tell(req, found, decision)

    def _taken_s(self, snapshot: Any) -> float:
        """On this process's clock, which is never set. That of another node may show any time: what comes from there
        was taken when it was first seen."""
        stamp_s, taken_s = self._taken.get(snapshot.dp_rank, (0.0, 0.0))
        if snapshot.timestamp != stamp_s:
            is_here = snapshot.dp_rank in self._probe.layout.ranks_here
            taken_s = time.monotonic() - (max(0.0, time.time() - snapshot.timestamp) if is_here else 0.0)
            self._taken[snapshot.dp_rank] = snapshot.timestamp, taken_s
        return taken_s

    def _wished(self, req: Any) -> str:
        """The policy that the client names for this request, else the server's."""
        wish = payload_of(req.kv_hints, hint.POLICY_ACTION) or {}
        name = wish.get("policy")
        return self._policy_name if name is None else str(name)

    def _policy(self, name: str) -> Policy | None:
        """The policy of that name; None for the dispatcher's own."""
        if name == self._policy_name:
            return None
        if name not in self._named:
            if name not in POLICIES:
                raise ValueError(f"policy {name!r} is none of {', '.join(POLICIES)}")
            self._named[name] = POLICIES[name]()
        return self._named[name]


def _unused(snapshot: Any, unpublished_tokens: int | None) -> int | None:
    """Room for a prompt: where no page lies that others find. What requests that run have there and nobody finds yet is
    no room either; SGLang counts it as used, and what they share with others, too."""
    if unpublished_tokens is None:
        return None
    return min(unpublished_tokens, max(0, snapshot.max_total_num_tokens - snapshot.num_used_tokens))


def _session_rank(req: Any, active: Collection[int]) -> int | None:
    """The rank of all turns of one of SGLang's sessions; None for what is no turn. Its id alone names it: what is
    remembered of sessions is bounded, and other requests may bear the same name."""
    name = None if req.session_params is None else req.session_params.id
    if name is None or not active:
        return None
    digest = hashlib.blake2b(str(name).encode(errors="surrogatepass"), digest_size=8).digest()
    return sorted(active)[int.from_bytes(digest) % len(active)]


def _prompt_of(req: Any, found: Found, session: str | None) -> Prompt:
    return Prompt(
        num_tokens=len(req.input_ids or ()),
        cached_tokens=found.tokens_by_rank,
        fetchable_tokens=found.fetchable_tokens,
        session=session,
        tokens=found.prompt,
    )


def tell(req: Any, found: Found, decision: Decision | None) -> None:
    """Add the hint to what the client may have sent, unless there is nothing to say. ``decision``: None where SGLang or
    the client chooses the rank."""
    if not found.tokens_by_rank and decision is None:
        return
    told = PrefixHint.from_tokens_by_rank(found.tokens_by_rank, decision)
    req.kv_hints = with_action(req.kv_hints, hint.ACTION_TYPE, told.payload())
