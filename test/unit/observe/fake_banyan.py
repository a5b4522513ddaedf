# SPDX-License-Identifier: Apache-2.0
"""A server that answers /server_info and /v1/loads as one with Banyan does, made of the product's own parts."""

from __future__ import annotations

import hashlib
import itertools
import random

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from banyan.core import Outcome, Run, SourceKind
from banyan.planner import MoveRates, Planner, PrefillCost, PrefillTimes, Pricing, Tail
from banyan.telemetry import Counters, Holding, Pseudonyms, RecentPrompts

PAGE = 16
NOW_S = 1_790_000_000.0


def keys(*tokens):
    """Of the pages of a prompt, each named by a number: chained, as SGLang's."""
    chained = itertools.accumulate(tokens, lambda digest, token: f"{digest}/{token}", initial="")
    return [hashlib.sha256(name.encode()).hexdigest() for name in list(chained)[1:]]


class FakeBanyan:
    """The ranks of one server; ``step`` lets it serve for a while."""

    def __init__(self, num_ranks=2, *, store=True, name="model", seed=0):
        self.name, self.num_ranks, self.has_store = name, num_ranks, store
        self.rng = random.Random(seed)
        self.up_s = 600.0
        self.now_s = NOW_S
        self.status = 200
        self.banyan = True
        self.counters = [Counters() for _ in range(num_ranks)]
        self.prompts = [RecentPrompts(PAGE) for _ in range(num_ranks)]
        self.planners = [self._planner() for _ in range(num_ranks)]
        self.holders = {}
        self.more = [{} for _ in range(num_ranks)]
        self.num_asked = 0
        self._rids = itertools.count()
        self._conversations()

    def _planner(self):
        rates = MoveRates()
        rates.observe(SourceKind.PEER, 160, 480.0)
        times = PrefillTimes(PrefillCost(1000.0, 100.0, 0.0, 0.0))
        return Planner(Pricing(times=times, rates=rates, num_layers=30), min_pages=1, clock=lambda: self.now_s)

    def _conversations(self):
        """Three tasks that begin with one system prompt, some conversations each."""
        system = range(20)
        for task in range(3):
            start = [*system, *(f"task{task}-{n}" for n in range(6 + 9 * task))]
            for chat in range(2 + task):
                whole = [*start, *(f"chat{task}-{chat}-{n}" for n in range(self.rng.randrange(4, 40)))]
                self.ask(whole, chat % self.num_ranks, num_turns=self.rng.randrange(1, 5))
        self.ask([f"other-{n}" for n in range(30)], 0, num_turns=1)

    def ask(self, names, rank, *, num_turns=1, rid=None):
        """A conversation at a rank, which then holds it; the arena holds most of it."""
        chain = keys(*names)
        for turn in range(num_turns):
            request = rid or f"{rank}{next(self._rids):03d}" + hashlib.sha256(chain[-1].encode()).hexdigest()[:28]
            self.prompts[rank].saw(request, chain[: len(chain) - num_turns + turn + 1], self.now_s)
        for key in chain:
            self.holders.setdefault(key, set()).add(rank)
        for key in chain[: len(chain) * 3 // 4]:
            self.holders[key].add("arena")
        own = max(1, len(chain) // 4)
        tail = Tail(own * PAGE, len(chain) * PAGE + 5, PAGE, (Run(SourceKind.PEER, len(chain) // 2),), rank)
        self.planners[rank].decide(request, tail)
        self.now_s += 0.0004
        self.planners[rank].record(request, Outcome.LEASED)
        self.now_s += 0.031
        self.planners[rank].record(request, Outcome.LANDED)
        return request

    def step(self, seconds=2.0):
        """Serve for so long."""
        self.up_s += seconds
        self.now_s += seconds
        for rank, counters in enumerate(self.counters):
            tokens = self.rng.randrange(3_000, 9_000)
            parts = [round(tokens * share) for share in (0.35, 0.2 + 0.1 * rank, 0.08, 0.02)]
            counters.count_prompt(tokens, own=parts[0], peer=parts[1], host=parts[2], store=parts[3])
            counters.lookups += 5
            counters.fetches += 4
            counters.fetched_bytes += (parts[1] + parts[2]) * 23_040
            counters.forward_us += int(seconds * 6e5)
            counters.wait_us += int(seconds * 9e3)
            counters.evicted_duplicate_pages += 17
            counters.evicted_last_pages += 2
            counters.displaced_pages += 6

    def _holding(self, chain):
        def leading(who):
            return len(list(itertools.takewhile(lambda key: who in self.holders.get(key, ()), chain)))

        return Holding([leading(rank) for rank in range(self.num_ranks)], leading("arena"))

    def state(self, rank):
        store = {
            "num_records": 1204,
            "backlog_pages": 3,
            "written_bytes": 940_000_000,
            "checksum_failures": 0,
            "stalls": 0,
        }
        state = {
            "dp_rank": rank,
            "shard": 0,
            "page_tokens": PAGE,
            "num_pool_pages": 375,
            "num_free_pages": 60 + 40 * rank,
            "num_published_pages": 240,
            "num_quarantined_pages": 4 * rank,
            "num_ranks": self.num_ranks,
            "num_live_ranks": self.num_ranks,
            "distinct_share": 0.91 - 0.02 * rank,
            **dict.fromkeys(("heard_tokens_15m", "heard_tokens_1h", "heard_tokens_24h"), 5_000 - rank),
            "hit_ceiling_15m": 0.71,
            "hit_ceiling_1h": 0.82 - 0.01 * rank,
            "hit_ceiling_24h": 0.93,
            "hit_share_half": 0.44,
            "hit_share_same": 0.64,
            "hit_share_double": 0.88,
            "changing_lines": [],
            "num_arena_frames": 1500,
            "num_arena_pages": 810,
            "num_arena_evicted_pages": 12,
            "prompts": self.prompts[rank].state(self._holding),
            "plans": self.planners[rank].explain(),
            "up_s": self.up_s,
            **({"store": store, "store_write_bytes_per_day": 25 << 30} if self.has_store else {}),
            **self.counters[rank].as_dict(),
            "forwards": [{"number": 7, "pieces": [[16, 0]], "forward_us": 900}],
            **self.more[rank],
        }
        return Pseudonyms(self.name).told({"dropped": [], **state})

    def info(self):
        states = [{"banyan": self.state(rank)} if self.banyan else {} for rank in range(self.num_ranks)]
        return {"model_path": self.name, "version": "0.5.23", "dp_size": self.num_ranks, "internal_states": states}

    def loads(self):
        ranks = range(self.num_ranks)
        loads = [
            {"dp_rank": rank, "num_running_reqs": 2 - rank % 2, "num_waiting_reqs": rank, "num_used_tokens": 1700}
            for rank in ranks
        ]
        return {"loads": loads}

    def app(self):
        async def server_info(request):
            self.num_asked += 1
            self.step()
            return JSONResponse(self.info()) if self.status == 200 else PlainTextResponse("broken", self.status)

        async def loads(request):
            return JSONResponse(self.loads())

        return Starlette(routes=[Route("/server_info", server_info), Route("/v1/loads", loads)])
