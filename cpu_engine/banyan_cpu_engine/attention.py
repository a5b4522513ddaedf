# SPDX-License-Identifier: Apache-2.0
"""``--attention-backend banyan_cpu``: torch attention that computes the new queries only.

Upstream's ``torch_native`` pads the queries of an extend to the whole sequence, so a cached prefix still costs the full
quadratic attention. Here the new queries attend to the cached keys under a lower-right causal mask, unless they are
most of the sequence; in bf16 the result is bit for bit the same. Decode is upstream's: grouping its query heads would
be seven times as fast and differ in last bits, and a server must give the same tokens with and without it.

Layers with a sliding window have pages of their own, and SGLang's pool translates what is written to them only: what is
read is translated here, once for all layers of a forward.

Models with a latent cache (MLA) attend to the latents themselves, in the extend as in decode. Upstream's choice for a
prompt without a cached prefix computes keys and values of their own from the latents, which torch_native then looks for
in the cache; and a hit would round otherwise than a miss.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from torch.nn.functional import pad, scaled_dot_product_attention

from banyan.sglang_plugin import runtime
from banyan_cpu_engine import ATTENTION_BACKEND, seam
from banyan_cpu_engine.float8 import within_range

MIN_BLOCK_ROWS = 4
"""Measured: in a block of four or more rows a row's result does not depend on their number. Fewer rows take another
routine, which rounds differently from time to time."""


MAX_MASKED_SHARE = 0.6
"""Measured: torch computes a causal attention in half the time of a masked one, so rows that are more than this share
of the sequence are computed sooner with the rest of it. Both take as long at 0.5 of 4,000 tokens and 0.6 of 1,200."""


def block_rows(num_queries: int) -> int:
    """Query rows that torch's CPU kernel works on together (FlashAttentionKernel.cpp in torch 2.14)."""
    return 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32


def register() -> None:
    """Make the backend known to SGLang in this process."""
    register_attention_backend(ATTENTION_BACKEND)(CpuAttention)


def attend_to_latents() -> None:
    """Have models with a latent cache attend in the absorbed form, whatever part of a prompt is cached."""
    # Imported here: other models need nothing of this.
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attention, batch: AttnForwardMethod.MLA)


def refuse_other_attention(model: Any) -> None:
    """Refuse a model one of whose layers asks for what torch's attention leaves out without a word, upstream's backend
    as well: its tokens would look right."""
    for layer in model.modules() if isinstance(model, torch.nn.Module) else ():
        if not isinstance(layer, RadixAttention):
            continue
        if layer.logit_cap > 0:
            does = "caps its scores"
        elif layer.xai_temperature_len > 0:
            does = "scales its scores by place"
        elif layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL:
            does = "attends to what comes later"
        elif layer.attn_type is AttentionType.ENCODER_ONLY and layer.sliding_window_size > -1:
            does = "attends within a window on both sides"
        elif layer.use_irope:
            does = "attends within chunks of its prompt"
        else:
            continue
        runtime.refuse(
            f"--attention-backend {ATTENTION_BACKEND}: layer {layer.layer_id} of this model {does}, which attention in "
            "plain torch does not: on a processor with AMX, and with SGLang's own sgl_kernel, use intel_amx"
        )


class CpuAttention(TorchNativeAttnBackend):
    """Upstream's CPU backend with an extend whose cost is new tokens x context."""

    _is_windowed = False
    """Whether the keys of the layer that is being computed lie in the pool of the windows."""
    _window_slots: torch.Tensor | None = None
    """Where this forward's tokens lie in it."""
    _drafts: torch.Tensor | None = None
    """Of a forward that verifies drafts: which of them each sees."""

    def __init__(self, model_runner: Any) -> None:
        seam.verify("scheduler")
        super().__init__(model_runner)
        refuse_other_attention(getattr(model_runner, "model", None))
        if isinstance(self.token_to_kv_pool, MLATokenToKVPool):
            attend_to_latents()

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that SGLang pads a batch with under attention data parallelism: one token, slot 0."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}
        self._drafts = drafts_of(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
        self._window_slots = None

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward_extend(q, *self._begin(layer, k, v), layer, *args, **kwargs)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward_decode(q, *self._begin(layer, k, v), layer, *args, **kwargs)

    def _begin(self, layer: Any, *values: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """This layer is computed now; its keys and values as the pool can keep them."""
        self._is_windowed = self._has_own_pages(layer)
        return within_range(self.token_to_kv_pool.dtype, *values)

    def _has_own_pages(self, layer: Any) -> bool:
        return self.use_sliding_window_kv_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]

    def _slots(
        self, slots: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens lie in the pool of the present layer, and each request's row there. What has left the window
        lies nowhere in the pool of the windows: it gets slot 0, which no mask lets see."""
        if not self._is_windowed:
            return slots, rows
        if self._window_slots is None:
            # Drafts that are being verified lie behind what is known.
            most = int(seq_lens.max()) + (0 if self._drafts is None else self._drafts.shape[-1])
            self._window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots[rows, :most].long())
        return self._window_slots, torch.arange(seq_lens.shape[0])

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
        req_to_token, req_pool_indices = self._slots(req_to_token, req_pool_indices, seq_lens)
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs
        )

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """Attention of ``query`` [new_tokens, heads, dim] to each request's cached and new keys, into ``output``."""
        req_to_token, req_pool_indices = self._slots(req_to_token, req_pool_indices, seq_lens)
        if self._drafts is not None:
            return self._verify(
                query,
                output,
                (k_cache, v_cache),
                req_to_token[req_pool_indices],
                seq_lens.tolist(),
                scaling=scaling,
                enable_gqa=enable_gqa,
                window=sliding_window_size,
            )
        if encoder_lens is not None or not causal:
            return super()._run_sdpa_forward_extend(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                *(extend_prefix_lens, extend_seq_lens, encoder_lens),
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
        start = 0
        rows, kv_lens, q_lens = req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist()
        for row, kv_len, q_len in zip(rows, kv_lens, q_lens, strict=True):
            own = slice(start, start + q_len)
            start += q_len
            if q_len > kv_len:
                # No request: under attention data parallelism SGLang fills the drafts of a rank up with rows to as many
                # as another has, behind a single token. Nobody reads what they say.
                output[own] = 0
            else:
                slots = req_to_token[row, :kv_len]
                keys, values = k_cache.index_select(0, slots), v_cache.index_select(0, slots)
                output[own] = self._attend(
                    query[own], keys, values, scaling=scaling, enable_gqa=enable_gqa, window=sliding_window_size
                )
        # Of no request: ranks in step compute a multiple of their shards. The layers behind write them to slot 0, which
        # is read under masks, and what is no number gets through these.
        output[start:] = 0
        return output

    def _verify(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        slots_of: torch.Tensor,
        seq_lens: list[int],
        *,
        scaling: float | None,
        enable_gqa: bool,
        window: int | None,
    ) -> torch.Tensor:
        """Each draft sees the known tokens, the drafts above it and itself; of these itself and the ``window`` before,
        in a layer that has one. ``slots_of``: [requests, tokens]."""
        assert self._drafts is not None
        num_nodes = self._drafts.shape[-1]
        for request, known in enumerate(seq_lens):
            slots = slots_of[request, : known + num_nodes]
            keys, values = (cache.index_select(0, slots) for cache in caches)
            for node in range(num_nodes):
                row = request * num_nodes + node
                seen = torch.cat((torch.arange(known), known + self._drafts[request, node].nonzero().flatten()))
                if window is not None:
                    seen = seen[-(window + 1) :]
                output[row : row + 1] = _sdpa(
                    query[row : row + 1],
                    keys[seen],
                    values[seen],
                    # It is the last of what it sees.
                    mask=torch.ones((1, seen.numel()), dtype=torch.bool),
                    scaling=scaling,
                    enable_gqa=enable_gqa,
                )
        # Of no request, as in an extend.
        output[len(seq_lens) * num_nodes :] = 0
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        enable_gqa: bool,
        window: int | None,
    ) -> torch.Tensor:
        """Each row as the same row of an attention over the whole sequence, to the last bit: over the token itself and
        the ``window`` before, in a layer that has one.

        Rows of a short last block of the whole sequence are computed in a block of as many rows, all others in blocks
        of at least MIN_BLOCK_ROWS; both see all keys, as the way the keys are cut depends on their number.
        """
        q_len, kv_len = query.shape[0], key.shape[0]
        if window is None and q_len > MAX_MASKED_SHARE * kv_len:
            whole = torch.cat((query.new_zeros(kv_len - q_len, *query.shape[1:]), query)) if q_len < kv_len else query
            return _sdpa(whole, key, value, mask=None, scaling=scaling, enable_gqa=enable_gqa)[kv_len - q_len :]
        num_short = kv_len % block_rows(kv_len)
        if num_short >= MIN_BLOCK_ROWS:
            num_short = 0
        num_tail = min(q_len, num_short)
        num_head = q_len - num_tail
        attended = []
        if num_head:
            rest = num_head % block_rows(num_head)
            num_rows = num_head + max(0, MIN_BLOCK_ROWS - rest) if rest else num_head
            mask = self._lower_right(num_rows, kv_len - num_tail, kv_len, window)
            attended.append(_sdpa_filled(query[:num_head], key, value, mask, scaling=scaling, enable_gqa=enable_gqa))
        if num_tail:
            mask = self._lower_right(num_short, kv_len, kv_len, window)
            attended.append(_sdpa_filled(query[num_head:], key, value, mask, scaling=scaling, enable_gqa=enable_gqa))
        return torch.cat(attended)

    def _lower_right(self, num_rows: int, end: int, kv_len: int, window: int | None) -> torch.Tensor:
        """The last row sees ``end`` keys, of these the last and the ``window`` before; each row before it, one less.
        One mask serves all layers of a forward."""
        mask = self._masks.get((num_rows, end, kv_len, window))
        if mask is None:
            mask = torch.ones((num_rows, kv_len), dtype=torch.bool).tril_(end - num_rows)
            if window is not None:
                mask.triu_(end - num_rows - window)
            self._masks[num_rows, end, kv_len, window] = mask
        return mask


def drafts_of(forward_batch: Any) -> torch.Tensor:
    """Which drafts each draft of a verification sees, itself among them: bool [requests, drafts, drafts]."""
    drafts = forward_batch.spec_info
    num_nodes = drafts.draft_token_num
    if drafts.tree_topk == 1:
        return torch.ones((num_nodes, num_nodes)).tril().bool().expand(forward_batch.batch_size, -1, -1)
    # SGLang passes the part of its mask that is about drafts, on a CPU.
    tree: torch.Tensor = drafts.custom_mask.view(forward_batch.batch_size, num_nodes, num_nodes)
    return tree.bool()


def _sdpa_filled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of ``query`` under the last rows of ``mask``; the rows that it lacks are filled up in front."""
    num_extra = mask.shape[0] - query.shape[0]
    filled = torch.cat((query[:1].expand(num_extra, -1, -1), query))
    return _sdpa(filled, key, value, mask=mask, scaling=scaling, enable_gqa=enable_gqa)[num_extra:]


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scaling: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of [tokens, heads, dim] tensors, causal where there is no mask."""
    value_dim = value.shape[-1]
    value = value.to(query.dtype)
    if value_dim < key.shape[-1]:
        # Torch's kernel for blocks of rows wants values as wide as keys; latents leave the rotary part out of them.
        value = pad(value, (0, key.shape[-1] - value_dim))
    attended = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.to(query.dtype).transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    return attended[..., :value_dim].squeeze(0).transpose(0, 1)
