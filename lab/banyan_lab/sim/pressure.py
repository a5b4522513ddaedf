# SPDX-License-Identifier: Apache-2.0
"""Eight nodes of eight GPUs whose pools are smaller than what is asked for: what is found again, by who evicts what.

A front places each request at a node by the shipped ``lmetric``, as ``banyan route`` does; the node's own dispatcher
places it at a rank. Pages are copied within a node only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from banyan.core import SourceKind
from banyan.routing import POLICIES, Dispatcher, LoadReport, Prompt, SeededTieBreaks
from banyan_lab.replay import Skew, Trace, skewed_trace
from banyan_lab.sim import dp
from banyan_lab.sim.dp_node import DpNode
from banyan_lab.sim.dp_rank import DpSite, Evicts, Request
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.figures import Figure
from banyan_lab.sim.prompts import PagedPrompt

NUM_NODES = 8
POOL_TOKENS = 48_000
"""Of a rank: a long model's share of a GPU, and small enough that a few thousand requests fill all pools."""

CHATS = Skew(
    num_sessions=640,
    num_turns=6,
    hot_ratio=0.2,
    num_cold_prefixes=40,
    prefix_blocks=32,
    turn_blocks=24,
    block_tokens=64,
    num_output_tokens=100,
    gap_s=0.06,
    think_s=36.0,
)
"""Nearly all sessions are under way at once, so a pool has lost most of a session by its next turn."""


def systems(block_tokens: int) -> dict[str, DpSite]:
    """What is compared, each with the same memory on each node."""
    shared = replace(dp.site(block_tokens=block_tokens, shares=True), pool_tokens=POOL_TOKENS)
    return {
        "ranks that share nothing": replace(shared, shares=False, evicts=Evicts.BY_AGE),
        "ranks that fetch and evict by age": replace(shared, evicts=Evicts.BY_AGE),
        "as shipped": shared,
        "one pool for each node": replace(shared, num_ranks=1, pool_tokens=POOL_TOKENS * shared.num_ranks),
    }


class Front:
    """Places requests at nodes. ``site``: of each node."""

    def __init__(
        self, sim: Simulation, site: DpSite, *, num_nodes: int, done: Callable[[Request, float], None]
    ) -> None:
        self._sim = sim
        self._page_tokens = site.page_tokens
        self.nodes = [DpNode(sim, site, POLICIES["lmetric"](), done=done) for _ in range(num_nodes)]
        self._dispatcher = Dispatcher(num_nodes, POLICIES["lmetric"](), tie_breaks=SeededTieBreaks(sim.seed))

    def submit(self, session: str, pages: list[str], prompt_tokens: int, output_tokens: int) -> None:
        """A request arrives now."""
        now_s = self._sim.now_s
        for number, node in enumerate(self.nodes):
            report = LoadReport(
                taken_s=now_s,
                received_s=math.nextafter(now_s, math.inf),
                num_running=node.num_requests,
                pending_prefill_tokens=node.pending_tokens,
                total_prefill_tokens=node.computed_tokens,
                total_prefill_us=round(node.computed_s * 1e6),
            )
            self._dispatcher.reported(number, report)
        prompt = Prompt(
            num_tokens=prompt_tokens,
            cached_tokens=[node.longest_prefix(pages) * self._page_tokens for node in self.nodes],
            fetchable_tokens=0,
            session=session,
            tokens=PagedPrompt(pages, self._page_tokens),
        )
        rank = self._dispatcher.place(prompt, range(len(self.nodes)), now_s).rank
        self.nodes[rank].submit(session, pages, prompt_tokens, output_tokens)


@dataclass(frozen=True, slots=True)
class Found:
    """Of one run: shares of the prompts' tokens, and times to the first token."""

    hit_share: float
    moved_share: float
    mean_ttft_s: float
    p90_ttft_s: float


def serve(trace: Trace, site: DpSite, *, num_nodes: int = NUM_NODES, seed: int = 0) -> Found:
    """Play the trace at its own pace."""
    sim = Simulation(seed)
    ttft_s: list[float] = []

    def done(request: Request, now_s: float) -> None:
        ttft_s.append(request.prefilled_s - request.arrived_s)

    front = Front(sim, site, num_nodes=num_nodes, done=done)
    for request in trace.requests:
        pages = [f"{request.scope}/{block}" for block in request.block_ids()]
        pages = pages[: request.num_input_tokens // trace.block_tokens]
        sim.at(request.at_s, front.submit, request.session, pages, request.num_input_tokens, request.num_output_tokens)
    sim.run()
    found = {kind: sum(node.tokens_from[kind] for node in front.nodes) for kind in SourceKind}
    asked = sum(node.prompt_tokens for node in front.nodes)
    ttft_s.sort()
    return Found(
        hit_share=sum(found.values()) / asked,
        moved_share=found[SourceKind.PEER] / asked,
        mean_ttft_s=sum(ttft_s) / len(ttft_s),
        p90_ttft_s=ttft_s[len(ttft_s) * 9 // 10],
    )


def figures(*, seed: int = 0, progress: Callable[[str], None] = lambda line: None) -> Iterator[Figure]:
    """Rows of every system."""
    trace = skewed_trace(CHATS, seed=seed)
    for name, site in systems(trace.block_tokens).items():
        served = serve(trace, site, seed=seed)
        where = f"{NUM_NODES} nodes of {dp.NUM_RANKS} x H100, Llama-3-8B, pools of {POOL_TOKENS} tokens, made chats"
        progress(f"{name}: hits {served.hit_share:.1%}, TTFT {served.mean_ttft_s:.3f} s, simulated")
        for what, value, unit in (
            ("tokens not computed", 100 * served.hit_share, "%"),
            ("tokens copied from peers", 100 * served.moved_share, "%"),
            ("mean TTFT", served.mean_ttft_s, "s"),
            ("p90 TTFT", served.p90_ttft_s, "s"),
        ):
            yield Figure(name=f"{what}: {name}", published=None, simulated=value, unit=unit, source=where)
