# SPDX-License-Identifier: Apache-2.0
"""Operators of linear attention (gated delta rule), token by token in torch: right, and slow.

Each value head keeps a matrix S of [value dim, key dim]. A token with key k, value v, decay g and strength beta makes
of it ``S' = exp(g) S + beta (v - exp(g) S k) k^T``, and reads ``S' q``. In front of that each channel of q, k and v
passes a convolution over its last tokens, of which the inputs are kept.

A token is always computed by operations on that token alone, of the same shapes. So what becomes of a sequence does not
depend on the chunks that it is cut into, to the last bit, where S is kept in float32 and the inputs in the type that
they come in. Narrower ones (--mamba-ssm-dtype, SGLANG_MAMBA_CONV_DTYPE) are rounded at each cut.
"""

from __future__ import annotations

import torch

CHUNK_TOKENS = 64
"""SGLang keeps states at multiples of it: those before each chunk are handed out."""
EPSILON = 1e-6
SOFTPLUS = (1.0, 20.0)
"""Beta and threshold: what torch takes by itself, and every caller in SGLang."""


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **unused: object,
) -> torch.Tensor:
    """Convolve the sequences of ``x`` [channels, tokens], which lie one behind the other from ``query_start_loc`` on.

    ``weight``: [channels, taps], the last tap for the token itself. ``conv_states`` [slots, channels, taps - 1] has the
    inputs before each sequence where it ``has_initial_state``, and gets those at its end; -1 is no slot.
    """
    convolved = torch.empty_like(x)
    starts = query_start_loc.tolist()
    spans = zip(starts, starts[1:], cache_indices.tolist(), has_initial_state.tolist(), strict=False)
    for start, end, slot, has_state in spans:
        before = x.new_zeros(x.shape[0], weight.shape[1] - 1)
        if has_state and slot >= 0:
            before = conv_states[slot].to(x.dtype)
        inputs = torch.cat((before, x[:, start:end]), dim=1)
        convolved[:, start:end] = _convolved(inputs, weight, bias, activation)
        if slot >= 0:
            conv_states[slot] = inputs[:, inputs.shape[1] - before.shape[1] :].to(conv_states.dtype)
    return convolved


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve the next token of each sequence, ``x`` [sequences, channels]; its inputs move up by one."""
    convolved = torch.empty_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        inputs = torch.cat((conv_states[slot].to(x.dtype), x[row].unsqueeze(1)), dim=1)
        convolved[row] = _convolved(inputs, weight, bias, activation)[:, 0]
        if slot >= 0:
            conv_states[slot] = inputs[:, 1:].to(conv_states.dtype)
    return convolved


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Each token of [channels, taps - 1 + tokens] that has all its taps."""
    num_tokens = inputs.shape[1] - weight.shape[1] + 1
    inputs, weight = inputs.float().contiguous(), weight.float()
    total = inputs.new_zeros(inputs.shape[0], num_tokens)
    if bias is not None:
        total += bias.float().unsqueeze(1)
    for tap in range(weight.shape[1]):
        total += inputs[:, tap : tap + num_tokens] * weight[:, tap : tap + 1]
    return total * _sigmoid(total) if activation in ("silu", "swish") else total


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """In float64, then rounded. In float32 the last elements of a row come out of other code than those before them,
    and differ in the last bit: a token's value would depend on where its prompt was cut."""
    return torch.sigmoid(x.double()).float()


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays (as logarithms) and strengths of ``a``, ``b`` [tokens, heads]: float32 [1, tokens, heads] both."""
    steps = torch.nn.functional.softplus((a.float().contiguous() + dt_bias.float()).double()).float()
    decays = -torch.exp(A_log.float()) * steps
    return decays.unsqueeze(0), _sigmoid(b.contiguous()).unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Sequences of ``q``, ``k`` [1, tokens, key heads, key dim] and ``v`` [1, tokens, value heads, value dim].

    ``initial_state`` [slots, value heads, value dim, key dim] is read and written at each sequence's slot. Returns what
    each token reads, and the states before every chunk of every sequence [1, chunks, ...].

    Raises:
        NotImplementedError: for heads in front of tokens, and for keys that have been normalised before.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("the CPU stand-in has tokens in front, and normalises keys itself")
    read = torch.empty_like(v)
    chunks = []
    starts = cu_seqlens.tolist()
    for start, end, slot in zip(starts, starts[1:], initial_state_indices.tolist(), strict=False):
        state = initial_state[max(slot, 0)].float()
        for token in range(start, end):
            if (token - start) % CHUNK_TOKENS == 0:
                chunks.append(state)
            state, read[0, token] = _step(state, q[0, token], k[0, token], v[0, token], g[0, token], beta[0, token])
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return read, None, torch.stack(chunks).unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """The same with the gates computed from ``a`` and ``b``: decode steps, one token for each sequence.

    Raises:
        NotImplementedError: also for a softplus of other values than torch's own.
    """
    if (softplus_beta, softplus_threshold) != SOFTPLUS:
        raise NotImplementedError(f"the CPU stand-in has the softplus of {SOFTPLUS} only")
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    read, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return read


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state behind one token, and what the token reads of it: [value heads, value dim]."""
    sharing = v.shape[0] // k.shape[0]
    q, k = (_normalised(part).repeat_interleave(sharing, dim=0).unsqueeze(1) for part in (q, k))
    state = state * torch.exp(g).view(-1, 1, 1)
    known = (state * k).sum(-1)
    state = state + ((v.float() - known) * beta.unsqueeze(1)).unsqueeze(2) * k
    return state, ((state * q).sum(-1) * q.shape[-1] ** -0.5).to(v.dtype)


def _normalised(part: torch.Tensor) -> torch.Tensor:
    part = part.float()
    return part * torch.rsqrt((part * part).sum(-1, keepdim=True) + EPSILON)
