# SPDX-License-Identifier: Apache-2.0
"""Prompts from blocks: equal block ids of a scope give equal tokens, everything else differs."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

from banyan_lab.replay.trace import TraceRequest

NUM_CACHED_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids that may be drawn: ``first`` to ``last``. Special tokens are outside."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"a vocabulary from {self.first} to {self.last} is empty")

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class Synthesis:
    """Turns requests into token ids. Pure: equal seed, vocabulary, block length and request, equal tokens."""

    def __init__(self, vocabulary: Vocabulary, *, block_tokens: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._block_tokens = block_tokens
        self._seed = seed
        self._block = lru_cache(maxsize=NUM_CACHED_BLOCKS)(self._draw_block)

    def prompt(self, request: TraceRequest) -> list[int]:
        """``num_input_tokens`` token ids; what no block covers is drawn for this request alone."""
        tokens: list[int] = []
        for block in request.block_ids():
            if len(tokens) >= request.num_input_tokens:
                break
            tokens.extend(self._block(request.scope, block))
        missing = request.num_input_tokens - len(tokens)
        if missing > 0:
            tokens.extend(self._draw(f"tail\0{request.session}\0{request.turn}", missing))
        return tokens[: request.num_input_tokens]

    def _draw_block(self, scope: str, block: int) -> list[int]:
        return self._draw(f"block\0{scope}\0{block}", self._block_tokens)

    def _draw(self, name: str, num_tokens: int) -> list[int]:
        """Tokens that are a hash of their name: the same in every process and on every machine."""
        digest = hashlib.shake_128(f"{self._seed}\0{name}".encode()).digest(4 * num_tokens)
        first, size = self._vocabulary.first, self._vocabulary.size
        return [first + word % size for word in struct.unpack(f"<{num_tokens}I", digest)]
