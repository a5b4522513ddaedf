# SPDX-License-Identifier: Apache-2.0
"""DRAM of all nodes as one pool of KV in front of storage. Who stays there is decided by ``banyan.arena.Residency``."""

from __future__ import annotations

from banyan_lab.sim.caches import Arena, Page
from banyan_lab.sim.turn import Agent, Turn

PAGE_TOKENS = 512
"""Coarse, so that a turn costs some hundred look-ups: the last half page of a context, 1 % of it, comes from storage.
"""


class DramPool:
    """Agents' contexts, page by page. One of no bytes holds nothing."""

    def __init__(self, num_bytes: float, kv_bytes_per_token: float) -> None:
        self._arena = Arena(int(num_bytes / (kv_bytes_per_token * PAGE_TOKENS)))
        self._is_there = num_bytes > 0
        self.found_tokens = 0
        self.asked_tokens = 0

    def held_tokens(self, turn: Turn) -> int:
        """How many leading tokens of the turn's context are here; their pages count as used."""
        self.asked_tokens += turn.cached_tokens
        if not self._is_there:
            return 0
        found = self._arena.prefix(_pages(turn.agent, turn.cached_tokens), 0) * PAGE_TOKENS
        self.found_tokens += found
        return found

    def keep(self, turn: Turn) -> None:
        """The turn has ended: its prompt and answer come here as far as there is room or something may go."""
        if self._is_there:
            self._arena.insert(_pages(turn.agent, turn.prompt_tokens + turn.output_tokens))


def _pages(agent: Agent, num_tokens: int) -> list[Page]:
    """Full pages only. Agents share nothing with each other."""
    return [f"{agent.number}/{place}" for place in range(num_tokens // PAGE_TOKENS)]
