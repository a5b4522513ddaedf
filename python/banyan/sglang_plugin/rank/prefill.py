# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill scheduling, watched and limited: which pieces a forward computes, and no more than the quota allows.

SGLang makes one adder for each scheduling pass. The subclass lowers the adder's own chunk budget around each request,
so that SGLang itself cuts the request that would exceed the quota, with everything that this entails.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.runtime_context import get_parallel

from banyan import faults
from banyan.pacing.lockstep import MoveBudget
from banyan.planner import Piece
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import learned_times, requests

logger = logging.getLogger("banyan")

_lockstep: _Lockstep | None = None
"""The limits of a rank that steps together with others."""

_is_awaited: Callable[[str], bool] | None = None
"""Whether other nodes may still answer for a request of this id."""

_has_begun: Callable[[str], None] | None = None
"""Told the id of a request that has been added to a prefill: its prefix is locked."""

_newest: weakref.ref[Any] | None = None
"""The adder of the pass that SGLang is in; it dies with the pass."""


def after_get_prefill_adder_class(chosen: type, scheduler: Any) -> type | None:
    """SGLang's adder class (or a plugin's), with Banyan's in front."""
    return None if runtime.config() is None else _watched(chosen)


@dataclass(frozen=True, slots=True)
class _Lockstep:
    most_moved_tokens: Callable[[], int]
    num_quarantined_tokens: Callable[[], int]


def step_together(*, most_moved_tokens: Callable[[], int], num_quarantined_tokens: Callable[[], int]) -> None:
    """From now on hold to the rules of ``banyan.pacing.lockstep``: a step moves so much at most, or one request, and a
    prefill is not given pages that peers still read."""
    global _lockstep
    _lockstep = _Lockstep(
        faults.quiet(most_moved_tokens, "prefill.most_moved_tokens", int),
        faults.quiet(num_quarantined_tokens, "prefill.num_quarantined_tokens", int),
    )


def hold_back(is_awaited: Callable[[str], bool]) -> None:
    """From now on pass over requests for which answers of other nodes may still come; they keep their place."""
    global _is_awaited
    _is_awaited = faults.quiet(is_awaited, "prefill.is_awaited", lambda request: False)


def tell_begun(has_begun: Callable[[str], None]) -> None:
    """From now on say which requests have left the queue for a prefill."""
    global _has_begun
    _has_begun = faults.quiet(has_begun, "prefill.has_begun", lambda request: None)


def requests_of_this_pass() -> Sequence[Any]:
    """The requests that the forward that is being prepared is for."""
    adder = None if _newest is None else _newest()
    return () if adder is None else adder.can_run_list


def pieces_of_this_pass() -> tuple[Piece, ...]:
    """What that forward computes, request by request."""
    return tuple(_piece(req) for req in requests_of_this_pass())


@functools.cache
def _watched(chosen: type) -> type:
    return type(f"Banyan{chosen.__name__}", (WatchedAdder, chosen), {})


def _piece(req: Any) -> Piece:
    return req.extend_len, req.prefix_len


class WatchedAdder:
    """In front of ``PrefillAdder``: the base of a class made by ``_watched``."""

    can_run_list: list[Any]
    page_size: int
    rem_chunk_tokens: int | None
    memory_budget: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        global _newest
        super().__init__(*args, **kwargs)
        _newest = weakref.ref(self)
        self._moves: MoveBudget | None = None
        if _lockstep is not None:
            self._moves = MoveBudget(_lockstep.most_moved_tokens())
            num_tokens = _lockstep.num_quarantined_tokens()
            self.memory_budget.total_offset += num_tokens
            self.memory_budget.current_offset += num_tokens
        self._meter = learned_times.meter(page_tokens=self.page_size, tp_size=get_parallel().attn_tp_size)
        if self._meter is not None and self.rem_chunk_tokens is None:
            _warn_no_chunks()
            self._meter = None

    def budget_state(self) -> AddReqResult:
        if self._meter is not None and self._meter.is_spent:
            return AddReqResult.OTHER
        return super().budget_state()  # type: ignore[misc]

    def add_chunked_req(self, req: Any) -> Any:
        """Go on with a request that was cut; SGLang puts it first. Returns it while it is not done."""
        if self._meter is None:
            return super().add_chunked_req(req)  # type: ignore[misc]
        wanted = len(req.full_untruncated_fill_ids) - req.prefix_len
        with self._at_most(self._meter.allow(req.prefix_len, wanted)):
            rest = super().add_chunked_req(req)  # type: ignore[misc]
        self._count(req)
        return rest

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        if _is_awaited is not None and _is_awaited(requests.id_of(req)):
            # The threads that wait for answers need the interpreter, and nothing else may be running.
            time.sleep(0)
            return AddReqResult.CONTINUE
        if self._moves is not None and not self._moves.has_room(req.host_hit_length):
            return AddReqResult.OTHER
        verdict = self._add_within_quota(req, has_chunked_req, truncation_align_size)
        if self._was_added(req):
            if self._moves is not None:
                self._moves.take(req.host_loaded_length)
            if _has_begun is not None:
                _has_begun(requests.id_of(req))
        return verdict

    def _add_within_quota(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        if self._meter is None:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)  # type: ignore[misc]
        prefix_tokens = req.prefix_len + req.host_hit_length
        allowed = self._meter.allow(prefix_tokens, len(req.full_untruncated_fill_ids) - prefix_tokens)
        if allowed == 0:
            return AddReqResult.OTHER
        with self._at_most(allowed):
            verdict = super().add_one_req(req, has_chunked_req, truncation_align_size)  # type: ignore[misc]
        # The verdict on the next request was formed under this one's limit.
        return self.budget_state() if self._count(req) else verdict

    @contextlib.contextmanager
    def _at_most(self, num_tokens: int) -> Iterator[None]:
        """SGLang's chunk budget, lowered for one request. It charges whole pages."""
        assert self.rem_chunk_tokens is not None
        charged = -(-num_tokens // self.page_size) * self.page_size
        hidden = max(0, self.rem_chunk_tokens - charged)
        self.rem_chunk_tokens -= hidden
        try:
            yield
        finally:
            self.rem_chunk_tokens += hidden

    def _was_added(self, req: Any) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def _count(self, req: Any) -> bool:
        """Whether the request was added; if so, it is charged."""
        if not self._was_added(req):
            return False
        assert self._meter is not None
        self._meter.take(_piece(req))
        return True


@functools.cache
def _warn_no_chunks() -> None:
    logger.warning(
        "banyan: --banyan-prefill-quota-ms has no effect, SGLang does not cut prefills of this model "
        "(chunked_prefill_size is off)"
    )
