# SPDX-License-Identifier: Apache-2.0
"""A draft model's attention on the CPU engine, in plain torch. SGLang knows none for it but Intel AMX's.

A draft decodes several tokens ahead of what is verified: each step sees the known tokens and the drafts before it. Only
chains of drafts: SGLang verifies trees in pages of several tokens with other backends only, and in pages of one token a
row of a step would be taken for another one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import attention_backends

from banyan.sglang_plugin import runtime
from banyan_cpu_engine import ATTENTION_BACKEND
from banyan_cpu_engine.attention import CpuAttention


def around_create_decode_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """What attends while a draft decodes; None where it decodes nothing."""
    if not _is_ours(factory):
        return original(factory)
    # Also of one step: what is verified is a tree then, too.
    if factory.topk > 1:
        runtime.refuse(
            f"--speculative-eagle-topk {factory.topk}: the CPU engine drafts chains, no trees; with "
            f"--speculative-num-steps {factory.speculative_num_steps} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {factory.speculative_num_steps + 1} it does"
        )
    if factory.speculative_num_steps <= 1:
        return original(factory)
    pool = factory.draft_model_runner.token_to_kv_pool
    if isinstance(pool, SWAKVPool) and pool.swa_layer_nums:
        # SGLang looks up once, for all steps together, where these layers write.
        runtime.refuse(
            "--speculative-draft-model-path: this draft model has sliding windows, and on the CPU engine only models "
            "without draft; name another one, or set --speculative-num-steps 1"
        )
    return DraftSteps(factory.draft_model_runner, factory.speculative_num_steps)


def around_create_draft_extend_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """What attends while a draft takes in a prompt, or what was verified."""
    return _stamped(CpuAttention(factory.draft_model_runner)) if _is_ours(factory) else original(factory)


def _is_ours(factory: Any) -> bool:
    asked = {factory.draft_attn_backend} if factory.draft_attn_backend else {*attention_backends()}
    return asked == {ATTENTION_BACKEND}


def _stamped(backend: Any) -> Any:
    """With the name by which SGLang looks its abilities up."""
    backend.prefill_attention_backend_str = ATTENTION_BACKEND
    backend.decode_attention_backend_str = ATTENTION_BACKEND
    return backend


class DraftStep(CpuAttention):
    """One step of a draft's decoding, behind ``num_before`` drafts and the last known token."""

    def __init__(self, model_runner: Any, num_before: int) -> None:
        super().__init__(model_runner)
        self._num_drafts = num_before + 1

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        seen = seq_lens + self._num_drafts
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seen, *args, **kwargs
        )


class DraftSteps:
    """All steps: SGLang takes ``attn_backends[i]`` for step i. The last draft is sampled and not decoded."""

    def __init__(self, model_runner: Any, num_steps: int) -> None:
        _stamped(self)
        self.attn_backends = [_stamped(DraftStep(model_runner, step)) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
