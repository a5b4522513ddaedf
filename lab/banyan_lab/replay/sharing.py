# SPDX-License-Identifier: Apache-2.0
"""How much the prompts of a trace have in common: what one endless cache could give, whoever serves them.

It judges samples (did they destroy what is shared?) and it classes requests by the tokens that are new to the
whole trace, which no configuration changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from banyan.layout import cacheable_tokens
from banyan_lab.replay.trace import Trace, TraceRequest

WARM_BELOW_TOKENS = 5_000
HEAVY_ABOVE_TOKENS = 20_000
"""The classes of "Elastic P2P vs PD-Combined" (2.4)."""


class RequestClass(StrEnum):
    WARM = "warm"
    MEDIUM = "medium"
    HEAVY = "heavy"


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a trace shares: ``new_tokens[i]`` of request ``i`` were in no earlier prompt's beginning."""

    num_input_tokens: int
    new_tokens: tuple[int, ...]

    @property
    def shared_ratio(self) -> float:
        """Prompt tokens that one endless cache would have held."""
        return 1 - sum(self.new_tokens) / self.num_input_tokens if self.num_input_tokens else 0.0


def sharing_of(trace: Trace) -> Sharing:
    """Follow the blocks in order of arrival. An answer's tokens count as new: what was answered is not recorded."""
    seen: set[tuple[str, int]] = set()
    new_tokens = []
    for request in trace.requests:
        num_known = _num_leading_known(request, seen)
        # The last token of a prompt is always computed.
        known_tokens = min(num_known * trace.block_tokens, cacheable_tokens(request.num_input_tokens))
        new_tokens.append(request.num_input_tokens - known_tokens)
        seen.update((request.scope, block) for block in request.block_ids())
    return Sharing(sum(request.num_input_tokens for request in trace.requests), tuple(new_tokens))


def _num_leading_known(request: TraceRequest, seen: set[tuple[str, int]]) -> int:
    num_known = 0
    for block in request.block_ids():
        if (request.scope, block) not in seen:
            break
        num_known += 1
    return num_known


def class_of(num_new_tokens: int, *, token_scale: float = 1.0) -> RequestClass:
    """The class of a request; limits shrink with a trace that was scaled down."""
    if num_new_tokens < WARM_BELOW_TOKENS * token_scale:
        return RequestClass.WARM
    return RequestClass.HEAVY if num_new_tokens > HEAVY_ABOVE_TOKENS * token_scale else RequestClass.MEDIUM
