# SPDX-License-Identifier: Apache-2.0
"""What is asked: prompts that nobody shares, by length, and streams that run beside each other, by number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.modes.models import random_prompt

PAGE_TOKENS = 16
FILL_TOKENS = 8_000
"""Prompts of this length fill the trees before anything is measured."""

TREE_PAGES = 10_000
"""So large are they then, and remain: pools have room for the longest prompt beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``num_requests`` a rank and round, ``num_at_once`` of them at a time."""

    name: str
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    num_at_once: int

    @property
    def is_of_streams(self) -> bool:
        """Whether its steps are what counts, and not its prompts."""
        return self.output_tokens > 1


def _prompts(tokens: int, num_requests: int, num_at_once: int) -> Case:
    return Case(
        name=f"prompts of {tokens:,}",
        prompt_tokens=tokens,
        output_tokens=1,
        num_requests=num_requests,
        num_at_once=num_at_once,
    )


def _streams(num: int, output_tokens: int, num_rounds: int = 1) -> Case:
    return Case(
        name=f"{num} streams" if num > 1 else "1 stream",
        prompt_tokens=32,
        output_tokens=output_tokens,
        num_requests=num * num_rounds,
        num_at_once=num,
    )


FILL = _prompts(FILL_TOKENS, -(-TREE_PAGES * PAGE_TOKENS // FILL_TOKENS), 2)
CASES = (
    _prompts(64, 200, 8),
    _prompts(512, 120, 8),
    _prompts(8_000, 4, 1),
    _prompts(100_000, 1, 1),
    _streams(1, 100, 12),
    _streams(16, 100),
    _streams(64, 50),
    _streams(256, 25),
)
LONGEST_TOKENS = max(case.prompt_tokens + case.output_tokens for case in CASES)
POOL_TOKENS = TREE_PAGES * PAGE_TOKENS + LONGEST_TOKENS + 4_096


def prompts(seed: int, num: int, num_tokens: int) -> Sequence[list[int]]:
    """``num`` prompts, each from its first token on unlike all others of any seed."""
    rng = random.Random(seed)
    return [random_prompt(rng, num_tokens) for _ in range(num)]
