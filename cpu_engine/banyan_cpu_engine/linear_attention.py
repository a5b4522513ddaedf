# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what linear attention (state space) needs Triton for on every device: SGLang's CPU engine has no such
kernels without AMX. Its other operators lie in the stand-in of ``sgl_kernel``. Written to be right; slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config

from banyan_cpu_engine import server


@server.around
def around_load_model(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Layers of linear attention ask torch for its accelerator when they are made, and torch names CUDA wherever it was
    built with it."""
    if mambaish_config(runner.model_config) is None:
        original(runner, *args, **kwargs)
        return
    with server.accelerator_is_cpu():
        original(runner, *args, **kwargs)


@server.around
def around_gated_norm(
    original: Callable[..., Any], norm: Any, x: torch.Tensor, g: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``x`` [rows, dim] normalised, times its weight, times the activation of its gate ``g``."""
    if args or kwargs:
        return original(norm, x, g, *args, **kwargs)
    rows, gate = x.float(), g.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        rows = rows * norm.weight.float()
    gate = torch.sigmoid(gate) if norm.activation == "sigmoid" else gate * torch.sigmoid(gate)
    return (rows * gate).to(x.dtype)


@server.around
def around_track_decode(
    original: Callable[..., None],
    backend: Any,
    forward_batch: Any,
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Copy the states of one layer of requests at a place where SGLang keeps one. Called for every layer."""
    if forward_batch.mamba_track_mask is None:
        return
    kept = forward_batch.mamba_track_mask[: forward_batch.batch_size].nonzero().flatten()
    sources = cache_indices[kept].long()
    targets = backend.forward_metadata.mamba_track_indices[kept].long()
    for states in (conv_states, ssm_states):
        states[targets] = states[sources]


@server.around
def around_shared_gate(
    original: Callable[..., None],
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Add what the shared expert of such a model says, times its gate, to what the others said. [rows, dim] each."""
    gate = torch.sigmoid((hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True))
    output.add_((gate * shared_output.float()).to(output.dtype))
