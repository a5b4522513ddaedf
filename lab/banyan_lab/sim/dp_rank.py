# SPDX-License-Identifier: Apache-2.0
"""A rank of a node of data-parallel ranks, what it costs, and a request on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from banyan.core import SourceKind
from banyan.planner import MoveRates, Planner, PrefillCost, PrefillTimes, Pricing
from banyan.planner.victims import CostShares
from banyan_lab.sim.batching import attention_cost
from banyan_lab.sim.caches import Page, Pool
from banyan_lab.sim.compute import DecodeModel, PrefillModel
from banyan_lab.sim.decode import DecodeRank
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.resources import Link

CHUNK_TOKENS = 8192
"""SGLang's default for a GPU of this size."""
COPY_BYTES_PER_S = 50e9
"""Between two GPUs of a node, or from host DRAM: PCIe 5.0 x16."""


class Evicts(Enum):
    """Which pages a full pool loses first."""

    BY_AGE = "by age"
    BY_LOSS = "by loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class DpSite:
    """Ranks and what they cost.

    Attributes:
        num_decode_only: 0: every rank does both.
        evicts: by age, with displaced pages that cost nothing, as ranks that know nothing of each other; or as shipped.
        mixes: a chunk of a prefill and a decode step are one forward, as in vLLM; else they alternate, as SGLang's do.
        copy_bytes_per_s: at which a rank's KV leaves for others, and at which the arena is read.
    """

    num_ranks: int
    num_decode_only: int
    shares: bool
    arena_pages: int
    pool_tokens: int
    page_tokens: int
    prefill: PrefillModel
    decode: DecodeModel
    evicts: Evicts = Evicts.BY_LOSS
    mixes: bool = False
    copy_bytes_per_s: float = COPY_BYTES_PER_S

    @property
    def num_hearing(self) -> int:
        """Ranks of which each hears what all of them are asked for."""
        return self.num_ranks - self.num_decode_only if self.hears else 1

    @property
    def hears(self) -> bool:
        return self.shares and self.evicts is Evicts.BY_LOSS

    @property
    def reserve_tokens(self) -> int:
        """Of a pool: ranks that share keep two chunks evicted on a GPU, an eighth of it at most."""
        return 2 * min(CHUNK_TOKENS, self.pool_tokens // 16) if self.shares else 0

    @property
    def page_bytes(self) -> float:
        return self.page_tokens * self.prefill.model.kv_bytes_per_token


class Request:
    """One prompt as pages, and its answer. Also what the decode side counts."""

    __slots__ = (
        "arrived_s",
        "begun_decode_s",
        "decode_rank",
        "number",
        "output_tokens",
        "pages",
        "prefilled_s",
        "prompt_tokens",
        "session",
        "uncached_tokens",
    )

    decode_rank: DecodeRank

    def __init__(
        self, number: int, session: str, pages: Sequence[Page], prompt_tokens: int, output_tokens: int, now_s: float
    ) -> None:
        self.number = number
        self.session = session
        self.pages = pages
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.uncached_tokens = prompt_tokens
        self.arrived_s = self.prefilled_s = self.begun_decode_s = now_s


class Rank:
    """One rank: pool, planner, queue, and the link on which its pages leave for peers."""

    def __init__(
        self,
        sim: Simulation,
        site: DpSite,
        number: int,
        copy_of: Callable[[int, Page], SourceKind | None],
        gone: Callable[[int, Page], None],
    ) -> None:
        self.number = number
        self.out = Link(sim, f"rank{number}.out", site.copy_bytes_per_s)
        self.rates = MoveRates()
        pricing = Pricing(
            times=PrefillTimes(_whole_cost(site.prefill)),
            rates=self.rates,
            num_layers=site.prefill.model.num_layers,
        )
        self.planner = Planner(pricing, min_pages=1)
        self.shares = CostShares(lambda kind: pricing.move_share(kind, site.page_tokens), lambda: sim.now_s)
        by_loss = None if site.evicts is Evicts.BY_AGE else partial(self._loss, copy_of)
        num_pages = (site.pool_tokens - site.reserve_tokens) // site.page_tokens
        self.pool = Pool(num_pages, by_loss, site.num_hearing, partial(gone, number))
        self.queue: deque[Request] = deque()
        self.busy = False
        self.ongoing_tokens = 0
        self.pending_tokens = 0
        self.num_requests = 0
        self.computed_tokens = 0
        self.computed_s = 0.0

    def _loss(
        self, copy_of: Callable[[int, Page], SourceKind | None], page: Page, chance: float
    ) -> tuple[SourceKind | None, float]:
        self.shares.refresh()
        copy = copy_of(self.number, page)
        return copy, self.shares.reload_costs([copy], [chance])[0]


def _whole_cost(prefill: PrefillModel) -> PrefillCost:
    """What a server would have fitted here: all of a forward, not its attention only."""
    attention = attention_cost(prefill)
    return replace(attention, token_us=attention.token_us + prefill.linear_s(1) * 1e6)
