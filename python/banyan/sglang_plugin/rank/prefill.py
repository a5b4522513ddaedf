# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefill scheduling, watched: which pieces a forward computes, who has to wait, and what a step moves.

SGLang makes one adder for each scheduling pass.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

from banyan import faults
from banyan.pacing.lockstep import MoveBudget
from banyan.planner import Piece
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import pending, requests

_most_moved_tokens: Callable[[], int] | None = None
"""What a step of a rank that steps together with others may move."""

_num_uncounted_tokens: Callable[[], Sequence[int]] | None = None
"""In quarantine, and not counted on."""

_is_awaited: Callable[[str], bool] | None = None
"""Whether other nodes may still answer for a request of this id."""

_has_begun: Callable[[str], None] | None = None
"""Told the id of a request that has been added to a prefill: its prefix is locked."""

MOST_PASSED_OVER = 64
"""By one pass, which ends with it: each has been looked up, and answers under way wait for that."""

_newest: weakref.ref[Any] | None = None
"""The adder of the pass that SGLang is in; it dies with the pass."""


def after_get_prefill_adder_class(chosen: type, scheduler: Any) -> type | None:
    """SGLang's adder class (or a plugin's), with Banyan's in front."""
    if runtime.config() is None:
        return None
    # Where one is thrown out for another, that other one takes the place at once.
    return _watched(chosen, passes_over=not scheduler.enable_priority_preemption)


def step_together(most_moved_tokens: Callable[[], int]) -> None:
    """From now on a step moves so much at most, or one request (``banyan.pacing.lockstep``)."""
    global _most_moved_tokens
    _most_moved_tokens = faults.quiet(most_moved_tokens, "prefill.most_moved_tokens", int)


def leave_out(num_uncounted_tokens: Callable[[], Sequence[int]]) -> None:
    """From now on a prefill is not given so many tokens that count as free, since peers still read them: of full pages
    and, of a model with windows, of those."""
    global _num_uncounted_tokens
    _num_uncounted_tokens = faults.quiet(num_uncounted_tokens, "prefill.num_uncounted_tokens", lambda: [0])


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


def around_can_schedule_lora_req(original: Callable[..., bool], scheduler: Any, req: Any, running: Any) -> bool:
    """Whether a request may join a pass for its adapter's sake: one that waits takes no place from others'."""
    return not _has_to_wait(req) and original(scheduler, req, running)


def _has_to_wait(req: Any) -> bool:
    if _is_awaited is None or not _is_awaited(requests.id_of(req)):
        return False
    # SGLang leaves the slot of a state with a request that is passed over: models with states may ask no other nodes
    # (``refusals.kinds``).
    # The threads that wait for answers need the interpreter, and nothing else may be running.
    time.sleep(0)
    return True


@functools.cache
def _watched(chosen: type, *, passes_over: bool) -> type:
    return type(f"Banyan{chosen.__name__}", (WatchedAdder, chosen), {"_passes_over": passes_over})


def _piece(req: Any) -> Piece:
    return req.extend_len, req.prefix_len


class WatchedAdder:
    """In front of ``PrefillAdder``: the base of a class made by ``_watched``."""

    can_run_list: list[Any]
    running_batch: Any
    max_running_requests: int | None
    is_hybrid_ssm_cache: bool
    token_to_kv_pool_allocator: Any
    _passes_over: bool
    """Whether requests wait for what is pending, as far as the scheduler goes."""
    _num_passed_over = 0
    """Of these, in this pass."""
    memory_budget: Any
    rem_total_tokens: int
    _num_held_tokens = 0
    """In quarantine, and not counted on in this pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        global _newest
        super().__init__(*args, **kwargs)
        _newest = weakref.ref(self)
        pending.begin_pass()
        self._moves = None if _most_moved_tokens is None else MoveBudget(_most_moved_tokens())
        full, *windows = (0,) if _num_uncounted_tokens is None else _num_uncounted_tokens()
        self._num_held_tokens = full
        self.memory_budget.total_offset += full
        self.memory_budget.current_offset += full
        self.memory_budget.swa_offset += sum(windows)

    def _add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        if _has_to_wait(req):
            return AddReqResult.CONTINUE
        if self._num_passed_over and not self._has_places_behind():
            return AddReqResult.OTHER
        # SGLang leaves the slot of a state with a request that is passed over.
        free_tokens = self.token_to_kv_pool_allocator.available_size
        if self._passes_over and not self.is_hybrid_ssm_cache and pending.has_to_wait(req, free_tokens):
            self._num_passed_over += 1
            return AddReqResult.CONTINUE if self._num_passed_over < MOST_PASSED_OVER else AddReqResult.OTHER
        if self._moves is not None and not self._moves.has_room(req.host_hit_length):
            return AddReqResult.OTHER
        theirs = runtime.STOPWATCH.elsewhere(super().add_one_req)  # type: ignore[misc]
        verdict = theirs(req, has_chunked_req, truncation_align_size)
        if self._was_added(req):
            pending.note(req)
            if self._moves is not None:
                self._moves.take(req.host_loaded_length)
            if _has_begun is not None:
                _has_begun(requests.id_of(req))
        # SGLang would add nobody until a running request has ended. Readers let go within milliseconds, and who was
        # passed over may fit where this one does not.
        if verdict == AddReqResult.NO_TOKEN and (self._num_passed_over or self._is_short_of_held(req)):
            return AddReqResult.OTHER
        return verdict

    add_one_req = runtime.STOPWATCH.wrap("prefill.add_one_req", _add_one_req)

    def add_chunked_req(self, req: Any) -> Any:
        """The next piece of a prompt that is longer than a batch."""
        left = super().add_chunked_req(req)  # type: ignore[misc]
        if self._was_added(req):
            pending.note(req)
        return left

    def _has_places_behind(self) -> bool:
        """Whether there is a place for one more beside those that keep theirs: who finds none waits until an answer has
        ended."""
        num_running = 0 if self.running_batch is None else len(self.running_batch.reqs)
        num_taken = num_running + len(self.can_run_list) + self._num_passed_over
        return self.max_running_requests is None or num_taken < self.max_running_requests

    def _is_short_of_held(self, req: Any) -> bool:
        """Whether it, or the next one, lacks no more than what readers hold."""
        if not self._num_held_tokens:
            return False
        needed_tokens = 0
        if not self._was_added(req):
            most_new = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
            needed_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len + max(most_new, 0)
        return needed_tokens - self.rem_total_tokens < self._num_held_tokens

    def preempt_to_schedule(self, req: Any) -> bool:
        """Nobody is thrown out for a request that would not take the place."""
        return not _has_to_wait(req) and super().preempt_to_schedule(req)  # type: ignore[misc]

    def _was_added(self, req: Any) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req
