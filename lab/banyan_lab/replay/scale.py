# SPDX-License-Identifier: Apache-2.0
"""A trace for a smaller machine: shorter prompts and answers, the same times and the same sharing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from banyan_lab.replay.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How lengths change.

    Attributes:
        tokens: factor of block and prompt lengths. Blocks are whole tokens, so the factor used is rounded.
        output_tokens: factor of answer lengths.
        max_input_tokens: a session ends before the first prompt that is longer.
        max_output_tokens: longer answers are shortened to it.
    """

    tokens: float = 1.0
    output_tokens: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (self.tokens > 0 and self.output_tokens > 0):
            raise ValueError("--token-scale and --output-scale are above 0")


def scaled(trace: Trace, scale: Scale) -> tuple[Trace, float, int]:
    """The scaled trace, the token factor that was used, and how many requests were too long and left out."""
    block_tokens = max(1, round(trace.block_tokens * scale.tokens))
    # A trace without blocks (length 1) has nothing that a rounded factor would have to fit.
    factor = block_tokens / trace.block_tokens if trace.block_tokens > 1 else scale.tokens
    ended: set[str] = set()
    requests = []
    for request in trace.requests:
        smaller = _shrunk(request, factor, scale)
        if scale.max_input_tokens is not None and smaller.num_input_tokens > scale.max_input_tokens:
            ended.add(request.session)
        if request.session not in ended:
            requests.append(smaller)
    part = replace(trace, block_tokens=block_tokens).of(requests)
    return part, factor, len(trace.requests) - len(requests)


def _shrunk(request: TraceRequest, factor: float, scale: Scale) -> TraceRequest:
    num_output_tokens = max(1, round(request.num_output_tokens * scale.output_tokens))
    if scale.max_output_tokens is not None:
        num_output_tokens = min(num_output_tokens, scale.max_output_tokens)
    return replace(
        request,
        num_input_tokens=max(1, round(request.num_input_tokens * factor)),
        num_output_tokens=num_output_tokens,
    )
