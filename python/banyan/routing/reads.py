# SPDX-License-Identifier: Apache-2.0
"""Which side of a pair reads what of a prompt from its store: the prefill side, the decode side, or each a part.

After "DualPath" (arXiv 2602.21548), where the side with the shorter read queue reads; it names splitting as future
work. What the decode side reads the prefill side pulls from it. The router asks for every request, the simulator for
every turn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

DETOUR_S = 0.05
"""What the way through the decode side costs beside its read: two messages, and a pull that begins when the read has
ended."""

LEAST_PART_TOKENS = 256
"""A shorter part is not worth a second reader."""

MOST_PART_S = 5.0
"""A prefill server waits twice as long for what another node reads, and then reads it itself."""


@dataclass(frozen=True, slots=True)
class ReadQueue:
    """What one side still has to read, and how fast it has been reading; None while that is not known. ``most_tokens``:
    of one request; None: any number."""

    num_tokens: int = 0
    tokens_per_s: float | None = None
    most_tokens: int | None = None


def split_read(num_tokens: int, *, prefill: ReadQueue, decode: ReadQueue, detour_s: float = 0.0) -> int:
    """How many of ``num_tokens`` the decode side reads when both sides read, so that both end together.

    A side that would not be done with its queue by then gets none of it.
    """
    prefill_rate, decode_rate, lead_tokens = _paces(prefill, decode, detour_s)
    ahead = decode_rate * (prefill.num_tokens + num_tokens) - prefill_rate * (decode.num_tokens + lead_tokens)
    return min(num_tokens, max(0, math.floor(ahead / (prefill_rate + decode_rate))))


def decode_part(num_tokens: int, *, prefill: ReadQueue, decode: ReadQueue) -> int:
    """How many of the last of ``num_tokens`` the decode side of a real pair reads: as ``split_read``, but neither side
    gets less than ``LEAST_PART_TOKENS``, nor decode more than it takes for one request, or is expected to have read in
    ``MOST_PART_S``."""
    part = split_read(num_tokens, prefill=prefill, decode=decode, detour_s=DETOUR_S)
    if part > num_tokens - part and num_tokens - part < LEAST_PART_TOKENS:
        part = num_tokens
    part = min(part, *_most(decode))
    if 0 < num_tokens - part < LEAST_PART_TOKENS:
        part = num_tokens - LEAST_PART_TOKENS
    return part if part >= LEAST_PART_TOKENS or part == num_tokens else 0


def _most(decode: ReadQueue) -> Iterator[int]:
    """What the decode side reads of one request at most, for each reason that is known."""
    yield sys.maxsize if decode.most_tokens is None else decode.most_tokens
    if decode.tokens_per_s:
        yield max(0, math.floor(MOST_PART_S * decode.tokens_per_s) - decode.num_tokens)


def _paces(prefill: ReadQueue, decode: ReadQueue, detour_s: float) -> tuple[float, float, float]:
    """Both rates, and the tokens that the decode side would read during the detour. Equal ones, and no detour, while
    either is not known: a side that never reads would never be measured."""
    if not prefill.tokens_per_s or not decode.tokens_per_s:
        return 1.0, 1.0, 0.0
    return prefill.tokens_per_s, decode.tokens_per_s, detour_s * decode.tokens_per_s
