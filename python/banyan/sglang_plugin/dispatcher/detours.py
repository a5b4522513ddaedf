# SPDX-License-Identifier: Apache-2.0
"""Requests that the dispatcher holds back while another rank computes their prompt. Dispatcher process only.

The prefill is a request of its own: the same prompt, one token, no answer to anybody. The directory tells when its
pages are there; then the held request goes to its rank, which finds them at the peer and fetches them.

Invariants
  1. A held request is sent on exactly once, whatever becomes of the prefill.
  2. It is sent on before an abort that means it, so that its rank answers the abort.
  3. It is held no longer than ``PATIENCE`` times what the prefill was expected to take, plus ``GRACE_S``.

States of a request: begun (prefill sent, request held) -> sent on, ``Until`` says why.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from banyan.routing import Detour, hint
from banyan.routing.hint import Until
from banyan.sglang_plugin.dispatcher.placement import FailureLog, Placer
from banyan.sglang_plugin.kv_hints import with_action

PATIENCE = 2.0
GRACE_S = 5.0
IDLE_S = 0.5
"""A rank may say that it has nothing to do some milliseconds before the pages of its last request are published."""


@dataclass(slots=True)
class _Held:
    req: Any
    detour: Detour
    since_s: float
    idle_since_s: float | None = None
    """Since when the rank that was to compute the prompt has had nothing to do."""

    @property
    def deadline_s(self) -> float:
        return self.since_s + PATIENCE * self.detour.expected_s + GRACE_S


class Detours:
    """What is held. Called by the dispatcher's only thread.

    ``send`` hands a request with ``routed_dp_rank`` to SGLang.
    """

    def __init__(
        self,
        placer: Placer,
        send: Callable[[Any], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placer = placer
        self._send = send
        self._clock = clock
        self._failures = FailureLog("banyan: SGLang's own method dispatches a request after its detour")
        self._held: list[_Held] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    def begin(self, req: Any, detour: Detour) -> None:
        """Have the prompt computed, and hold the request."""
        self._send(prefill_of(req, detour.prefill_rank))
        self._held.append(_Held(req, detour, self._clock()))

    def send_on(self, active: Collection[int]) -> None:
        """Send on every held request whose wait is over."""
        for held in list(self._held):
            until = self._until(held, active)
            if until is not None:
                self._release(held, until, active)

    def abort(self, message: Any, active: Collection[int]) -> None:
        """Send on what an abort means, as SGLang matches it; the prefill's id begins with the request's."""
        for held in list(self._held):
            if message.abort_all or held.req.rid.startswith(message.rid):
                self._release(held, Until.ABORTED, active)

    def _until(self, held: _Held, active: Collection[int]) -> Until | None:
        detour = held.detour
        if detour.prefill_rank not in active or detour.decode_rank not in active:
            return Until.INACTIVE
        if self._placer.has_landed(held.req, detour.prefill_rank):
            return Until.LANDED
        now_s = self._clock()
        if not self._placer.is_idle(detour.prefill_rank):
            held.idle_since_s = None
        elif held.idle_since_s is None:
            held.idle_since_s = now_s
        elif now_s - held.idle_since_s >= IDLE_S:
            return Until.GIVEN_UP
        return Until.LATE if now_s >= held.deadline_s else None

    def _release(self, held: _Held, until: Until, active: Collection[int]) -> None:
        # First of all, so that no failure below can send it twice.
        self._held.remove(held)
        held_us = int((self._clock() - held.since_s) * 1e6)
        try:
            if until is Until.INACTIVE:
                self._placer.place_anew(held.req, active)
            else:
                self._placer.place_after(held.req, held.detour, held_us=held_us, held_until=until.value)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request is served as in stock SGLang
            self._failures.note(error)
        # As SGLang does before it sends.
        held.req.wrap_pickle_fields()
        self._send(held.req)


def prefill_of(req: Any, rank: int) -> TokenizedGenerateReqInput:
    """A request for the KV of a prompt: nobody gets its one token."""
    sampling_params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    sampling_params.normalize(None)
    # It begins with the request's, so that an abort means both, and no client can have the same.
    rid = f"{req.rid}-banyan-{uuid.uuid4().hex}"
    return TokenizedGenerateReqInput(
        rid=rid,
        http_worker_ipc=req.http_worker_ipc,
        input_text=None,
        input_ids=req.input_ids,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling_params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        lora_id=req.lora_id,
        lora_name=req.lora_name,
        routed_dp_rank=rank,
        priority=req.priority,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
        no_logs=req.no_logs,
        time_stats=req.time_stats,
        kv_hints=with_action(
            req.kv_hints,
            action_id=f"banyan-{rid}",
            action_type=hint.DETOUR_ACTION,
            action_version=hint.ACTION_VERSION,
            payload={},
        ),
    )
