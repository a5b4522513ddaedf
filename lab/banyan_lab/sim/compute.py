# SPDX-License-Identifier: Apache-2.0
"""How long a GPU takes: prefill as work over an achieved rate, decode as bytes over bandwidth plus a fixed part.

Both achieved rates are derived from published measurements of a production system (``data/engines.toml``), not from the
figures that the simulator is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from banyan_lab.sim.hardware import Gpu, gpu, table
from banyan_lab.sim.llms import Llm, llm


@dataclass(frozen=True, slots=True)
class Rates:
    """What one GPU reaches.

    Attributes:
        prefill_flops_per_s: in prefill, all kernels and communication included.
        decode_layer_s: of each layer of a decode step whatever the batch: launches, all-to-all, synchronisation.
    """

    prefill_flops_per_s: float
    decode_layer_s: float


def deepseek_rates() -> Rates:
    """From DeepSeek's overview of its inference system: tokens per second of an H800 node, and of one request."""
    seen, model, chip = table("engines")["deepseek"], llm("deepseek-v3"), gpu("H800")
    computed_per_s = seen["input_tokens_per_s"] * (1 - seen["hit_share"])
    # Prefill there ran attention unabsorbed: 192 + 128 dimensions for each head instead of 576 + 512.
    pair_flops = model.pair_flops * (192 + 128) / (2 * model.latent_dim + model.rope_dim)
    flops_per_token = model.linear_flops_per_token + seen["mean_context_tokens"] / 2 * pair_flops
    step_s = 1 / seen["output_tokens_per_s_of_one_request"]
    batch = seen["output_tokens_per_s"] / seen["num_gpus"] * step_s
    kv_bytes = batch * seen["mean_context_tokens"] * seen["kv_bytes_per_token_layer"] * model.num_layers
    moved_s = (model.weight_bytes_on(seen["decode_gpus"]) + kv_bytes) / chip.hbm_bytes_per_s
    prefill_flops_per_s = computed_per_s * flops_per_token / seen["num_gpus"]
    computed_s = batch * model.linear_flops_per_token / prefill_flops_per_s
    return Rates(prefill_flops_per_s, (step_s - moved_s - computed_s) / model.num_layers)


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds of one GPU for parts of a forward pass."""

    model: Llm
    flops_per_s: float

    def linear_s(self, new_tokens: float) -> float:
        return new_tokens * self.model.linear_flops_per_token / self.flops_per_s

    def attention_s(self, *, new_tokens: float, cached_tokens: float) -> float:
        return self.model.attention_flops(new_tokens=new_tokens, cached_tokens=cached_tokens) / self.flops_per_s


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """Seconds of one decode step of a GPU that holds ``weight_bytes`` and a batch: fixed part, memory, and work."""

    model: Llm
    chip: Gpu
    weight_bytes: float
    rates: Rates

    @property
    def layer_s(self) -> float:
        return self.rates.decode_layer_s

    @property
    def fixed_s(self) -> float:
        return self.layer_s * self.model.num_layers + self.weight_bytes / self.chip.hbm_bytes_per_s

    def step_s(self, *, num_requests: float, context_tokens: float) -> float:
        """``context_tokens`` over all requests. An indexer reads all its keys, attention only what it selected."""
        if num_requests <= 0:
            return self.fixed_s
        model = self.model
        attended = context_tokens
        if model.topk_tokens:
            attended = min(context_tokens, num_requests * model.topk_tokens)
        index_bytes = context_tokens * model.index_bytes_per_token
        read_s = (attended * model.attention_bytes_per_token + index_bytes) / self.chip.hbm_bytes_per_s
        return self.fixed_s + read_s + num_requests * model.linear_flops_per_token / self.rates.prefill_flops_per_s


def kv_room_bytes(model: Llm, chip: Gpu, *, num_gpus: int) -> float:
    """HBM left for KV on each of ``num_gpus`` GPUs that share the experts of a mixture, or a dense model.

    Raises:
        ValueError: when the model does not fit.
    """
    engines = table("engines")["deepseek"]
    room = chip.hbm_bytes * (1 - engines["reserved_hbm_share"]) - engines["activation_bytes"]
    room -= model.weight_bytes_on(num_gpus)
    if room <= 0:
        raise ValueError(f"{model.title} does not fit {num_gpus} GPUs of {chip.hbm_bytes:.3g} bytes")
    return room
