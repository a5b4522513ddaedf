# SPDX-License-Identifier: Apache-2.0
"""Requests that the dispatcher holds back while another rank computes their prompt. Dispatcher process only.

The prefill is a request of its own: the same prompt, one token, no answer to anybody. The directory tells when its
pages are there; then the held request goes to its rank, which finds them at the peer and fetches them. It is held
(``held``) no longer than ``PATIENCE`` times what the prefill was expected to take, plus ``GRACE_S``.
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
from banyan.sglang_plugin.dispatcher.held import Held, HeldRequests
from banyan.sglang_plugin.dispatcher.placement import FailureLog, Placer
from banyan.sglang_plugin.kv_hints import with_action

PATIENCE = 2.0
GRACE_S = 5.0
IDLE_S = 0.5
"""A rank may say that it has nothing to do some milliseconds before the pages of its last request are published."""


@dataclass(slots=True, eq=False)
class _Detoured(Held):
    detour: Detour
    idle_since_s: float | None = None
    """Since when the rank that was to compute the prompt has had nothing to do."""

    @property
    def deadline_s(self) -> float:
        return self.since_s + PATIENCE * self.detour.expected_s + GRACE_S


class Detours(HeldRequests[_Detoured]):
    """``send`` is called with ``routed_dp_rank``."""

    def __init__(
        self,
        placer: Placer,
        send: Callable[[Any], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        failures = FailureLog("banyan: SGLang's own method dispatches a request after its detour")
        super().__init__(placer, send, clock, failures)

    def begin(self, req: Any, detour: Detour) -> None:
        """Have the prompt computed, and hold the request. An abort ends both: the prefill's id begins with its."""
        self._send(prefill_of(req, detour.prefill_rank))
        self._held.append(_Detoured(req, self._clock(), detour))

    def _until(self, held: _Detoured, active: Collection[int]) -> Until | None:
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

    def _place(self, held: _Detoured, until: Until, active: Collection[int], held_us: int) -> None:
        if until is Until.INACTIVE:
            self._placer.place_anew(held.req, active)
        else:
            self._placer.place_after(held.req, held.detour, held_us=held_us, held_until=until.value)


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
