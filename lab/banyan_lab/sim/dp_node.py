# SPDX-License-Identifier: Apache-2.0
"""The data-parallel ranks of one node: routing, sharing and planning by the shipped code, GPUs and copies simulated.

Two kinds of node. Combined: every rank prefills and decodes, and while it prefills, each decode step waits for one
chunk. Separated: some ranks prefill only and hand the KV over to ranks that decode only.

A request: arrived -> routed -> waiting for its rank's prefill -> prefilling (its KV comes from peers or the arena
meanwhile) -> decoding -> done. A rank prefills one request at a time, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from banyan.core import Run, SourceKind
from banyan.layout import cacheable_tokens
from banyan.planner import Tail
from banyan.routing import Dispatcher, LoadReport, Policy, Prompt, Query, SeededTieBreaks, Wait
from banyan_lab.sim.caches import Arena, Page
from banyan_lab.sim.decode import DecodeGroup, DecodeRank
from banyan_lab.sim.dp_rank import CHUNK_TOKENS, DpSite, Evicts, Rank, Request
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.hardware import node as node_spec
from banyan_lab.sim.nodes import Join, Node
from banyan_lab.sim.prompts import PagedPrompt
from banyan_lab.sim.resources import Link
from banyan_lab.sim.source_rules import DecodeState, decode_rank


class DpNode:
    """Plays requests; ``done`` sees each one that has its last token."""

    def __init__(
        self, sim: Simulation, site: DpSite, policy: Policy, *, done: Callable[[Request, float], None]
    ) -> None:
        self._sim = sim
        self._site = site
        self._done = done
        self._tie_breaks = SeededTieBreaks(sim.seed)
        self._dispatcher = Dispatcher(site.num_ranks - site.num_decode_only, policy, tie_breaks=self._tie_breaks)
        self._arena = Arena(site.arena_pages)
        self._arena_link = Link(sim, "arena.out", site.copy_bytes_per_s)
        self._ranks: list[Rank] = []
        for number in range(site.num_ranks - site.num_decode_only):
            self._ranks.append(Rank(sim, site, number, self._copy_of, self._goes_down))
        self._decode: list[DecodeGroup] = []
        self._num_requests = 0
        self._held_back: list[tuple[Request, Wait]] = []
        self.tokens_from: Counter[SourceKind] = Counter()
        self.prompt_tokens = 0
        self._add_decode()

    def _add_decode(self) -> None:
        """Every decode rank steps by itself: a dense model has nobody to wait for."""
        host = Node(self._sim, node_spec("hopper"), "node")
        room_bytes = self._site.pool_tokens * self._site.prefill.model.kv_bytes_per_token
        for _ in range(self._site.num_decode_only or len(self._ranks)):
            group = DecodeGroup(self._sim, self._site.decode, self._decoded)
            DecodeRank(self._sim, group, host, room_bytes)
            self._decode.append(group)

    # ---- route -------------------------------------------------------------------------------------------------

    def submit(self, session: str, pages: Sequence[Page], prompt_tokens: int, output_tokens: int) -> int:
        """A request arrives now; its number, which no other has."""
        request = Request(self._num_requests, session, pages, prompt_tokens, output_tokens, self._sim.now_s)
        self._num_requests += 1
        prompt = self._prompt(request)
        active = range(len(self._ranks))
        wait = self._dispatcher.wait(prompt, active, self._sim.now_s) if self._site.shares else None
        if wait is None:
            self._place(request, prompt)
        else:
            self._held_back.append((request, wait))
        return request.number

    def _prompt(self, request: Request) -> Prompt:
        """As the dispatcher sees it now."""
        own = [rank.pool.prefix(request.pages) * self._site.page_tokens for rank in self._ranks]
        in_arena = self._arena.prefix(request.pages, 0) * self._site.page_tokens
        return Prompt(
            num_tokens=request.prompt_tokens,
            cached_tokens=own,
            fetchable_tokens=max(*own, in_arena) if self._site.shares else 0,
            session=request.session,
            tokens=PagedPrompt(request.pages, self._site.page_tokens),
        )

    def _place(self, request: Request, prompt: Prompt) -> None:
        choice = self._dispatcher.place(prompt, range(len(self._ranks)), self._sim.now_s)
        rank = self._ranks[choice.rank]
        rank.pool.asked(request.pages, request.number)
        if self._site.hears:
            for peer in self._ranks[: rank.number] + self._ranks[rank.number + 1 :]:
                peer.pool.heard(request.pages)
        # As the dispatcher counts it: what a rank fetches it does not compute.
        cached_tokens = max(prompt.cached_tokens[rank.number], prompt.fetchable_tokens)
        request.uncached_tokens = request.prompt_tokens - cached_tokens
        rank.ongoing_tokens += request.prompt_tokens + request.output_tokens
        rank.pending_tokens += request.uncached_tokens
        rank.num_requests += 1
        rank.queue.append(request)
        self._prefill_next(rank)

    def _send_on(self) -> None:
        """Place what was held back for pages that are there now, or will not come."""
        for held in list(self._held_back):
            request, wait = held
            prompt = self._prompt(request)
            has_come = prompt.cached_tokens[wait.rank] >= wait.num_tokens
            if has_come or not self._dispatcher.is_pending(prompt, wait):
                self._held_back.remove(held)
                self._place(request, prompt)

    def _report(self, rank: Rank) -> None:
        """What the rank says of itself whenever something begins or ends there; all that was sent to it is in it."""
        waiting = len(rank.queue) + rank.busy
        now_s = self._sim.now_s
        report = LoadReport(
            taken_s=now_s,
            received_s=math.nextafter(now_s, math.inf),
            num_running=rank.num_requests - waiting,
            num_waiting=waiting,
            pending_prefill_tokens=rank.pending_tokens,
            ongoing_tokens=rank.ongoing_tokens,
            unused_tokens=self._unused_tokens(rank),
            total_prefill_tokens=rank.computed_tokens,
            total_prefill_us=round(rank.computed_s * 1e6),
        )
        self._dispatcher.reported(rank.number, report)

    def _unused_tokens(self, rank: Rank) -> int | None:
        if self._site.evicts is Evicts.BY_AGE or self._arena.has_room:
            return None
        return rank.pool.num_free * self._site.page_tokens + self._site.reserve_tokens

    def _copy_of(self, number: int, page: Page) -> SourceKind | None:
        if self._site.shares and any(page in rank.pool for rank in self._ranks if rank.number != number):
            return SourceKind.PEER
        # What nobody has goes down when it goes, and a full arena makes room for it.
        return SourceKind.HOST if self._site.arena_pages else None

    def _goes_down(self, number: int, page: Page) -> None:
        """What leaves a pool goes to the arena, unless a peer has it; what is there is wanted again."""
        is_lost = self._copy_of(number, page) is not SourceKind.PEER
        if is_lost and not self._arena.prefix([page], 0):
            self._arena.insert([page])

    def longest_prefix(self, pages: Sequence[Page]) -> int:
        """Leading pages that some rank of the node has, or the arena behind it."""
        return self._arena.prefix(pages, max(rank.pool.prefix(pages) for rank in self._ranks))

    @property
    def computed_tokens(self) -> int:
        """By all ranks, so far."""
        return sum(rank.computed_tokens for rank in self._ranks)

    @property
    def computed_s(self) -> float:
        """In which they were: the mean, for ranks prefill beside each other."""
        return sum(rank.computed_s for rank in self._ranks) / len(self._ranks)

    @property
    def pending_tokens(self) -> int:
        """Of prompts that wait at all ranks, as SGLang tells them: without the chunks that are being computed."""
        return sum(rank.pending_tokens for rank in self._ranks)

    @property
    def num_requests(self) -> int:
        """Of all ranks."""
        return sum(rank.num_requests for rank in self._ranks)

    # ---- plan and prefill --------------------------------------------------------------------------------------

    def _prefill_next(self, rank: Rank) -> None:
        if rank.busy or not rank.queue:
            return
        rank.busy = True
        request = rank.queue.popleft()
        page_tokens, pages = self._site.page_tokens, request.pages
        own = rank.pool.prefix(pages)
        runs, sources = self._found(rank, pages, own)
        tail = Tail(own * page_tokens, request.prompt_tokens, page_tokens, tuple(runs))
        moved = rank.planner.decide(str(request.number), tail).num_pages
        cached = min((own + moved) * page_tokens, cacheable_tokens(request.prompt_tokens))
        new_tokens = request.prompt_tokens - cached
        self.prompt_tokens += request.prompt_tokens
        self.tokens_from[SourceKind.OWN] += min(own * page_tokens, request.prompt_tokens)
        prefill = self._site.prefill
        work_s = prefill.linear_s(new_tokens) + prefill.attention_s(new_tokens=new_tokens, cached_tokens=cached)
        num_chunks = -(-new_tokens // CHUNK_TOKENS)
        work_s = self._interfere(rank, work_s, num_chunks)
        parts = []
        for run, link in zip(runs, sources, strict=True):
            taken = min(run.num_pages, moved)
            moved -= taken
            if taken:
                parts.append((run.kind, taken, link))
        rank.pending_tokens += new_tokens - request.uncached_tokens
        self._prefill_chunk(rank, new_tokens, work_s / num_chunks)
        join = Join(1 + len(parts), self._prefilled, rank, request)
        self._sim.after(work_s, join)
        for kind, num_pages, link in parts:
            self.tokens_from[kind] += num_pages * page_tokens
            link.start(num_pages * self._site.page_bytes, self._moved, rank, kind, num_pages, self._sim.now_s, join)

    def _prefill_chunk(self, rank: Rank, num_tokens: int, chunk_s: float) -> None:
        """The next chunk of a prompt begins, of which so many tokens are not computed. What is behind it waits."""
        num_begun = min(CHUNK_TOKENS, num_tokens)
        rank.pending_tokens -= num_begun
        rank.computed_tokens += num_begun
        rank.computed_s += chunk_s
        self._report(rank)
        if num_begun < num_tokens:
            self._sim.after(chunk_s, self._prefill_chunk, rank, num_tokens - num_begun, chunk_s)

    def _found(self, rank: Rank, pages: Sequence[Page], own: int) -> tuple[list[Run], list[Link]]:
        """Where the tail's leading pages are: at the peer that has most, behind it in the arena."""
        runs: list[Run] = []
        links: list[Link] = []
        reach = own
        if self._site.shares:
            held = {peer.number: peer.pool.prefix(pages) for peer in self._ranks if peer is not rank}
            longest = max(held.values(), default=0)
            if longest > reach:
                holder = next(number for number, length in held.items() if length == longest)
                runs.append(Run(SourceKind.PEER, longest - reach))
                links.append(self._ranks[holder].out)
                reach = longest
        deep = self._arena.prefix(pages, reach)
        if deep > reach:
            runs.append(Run(SourceKind.HOST, deep - reach))
            links.append(self._arena_link)
        return runs, links

    def _interfere(self, rank: Rank, work_s: float, num_chunks: int) -> float:
        """On a rank that does both, chunks and decode steps wait for each other, or share a forward."""
        if self._site.num_decode_only:
            return work_s
        group = self._decode[rank.number]
        own_s = group.own_step_s if group.num_running else 0.0
        if self._site.mixes:
            forward_s = max(work_s / num_chunks, own_s)
            group.set_pause(max(0.0, forward_s - group.own_step_s))
            return num_chunks * forward_s
        group.set_pause(work_s / num_chunks)
        return work_s + num_chunks * own_s

    def _moved(self, rank: Rank, kind: SourceKind, num_pages: int, began_s: float, join: Join) -> None:
        rank.rates.observe(kind, num_pages * self._site.page_tokens, (self._sim.now_s - began_s) * 1e6)
        join()

    def _prefilled(self, rank: Rank, request: Request) -> None:
        rank.busy = False
        request.prefilled_s = self._sim.now_s
        rank.pool.served(request.number)
        rank.pool.insert(request.pages)
        if self._site.num_decode_only:
            self._release(rank, request)
            self._hand_over(rank, request)
        else:
            self._decode[rank.number].set_pause(0.0)
            self._join(request, rank.number)
        self._report(rank)
        self._send_on()
        self._prefill_next(rank)

    def _hand_over(self, rank: Rank, request: Request) -> None:
        states = [
            DecodeState(rank=number, ongoing_tokens=group.ongoing_tokens, free_tokens=self._site.pool_tokens)
            for number, group in enumerate(self._decode)
        ]
        query = Query(turn=request.number, num_prompt_tokens=request.prompt_tokens)
        number = decode_rank(query, {0: states}, request.prompt_tokens + request.output_tokens, self._tie_breaks)
        num_bytes = request.prompt_tokens * self._site.prefill.model.kv_bytes_per_token
        rank.out.start(num_bytes, self._join, request, number)

    # ---- decode ------------------------------------------------------------------------------------------------

    def _join(self, request: Request, number: int) -> None:
        request.decode_rank = self._decode[number].ranks[0]
        request.decode_rank.assign(request)
        self._decode[number].join(request)

    def _decoded(self, request: Request) -> None:
        request.decode_rank.release(request)
        if not self._site.num_decode_only:
            number = next(i for i, group in enumerate(self._decode) if group is request.decode_rank.group)
            self._release(self._ranks[number], request)
            self._report(self._ranks[number])
        self._done(request, self._sim.now_s)

    def _release(self, rank: Rank, request: Request) -> None:
        rank.ongoing_tokens -= request.prompt_tokens + request.output_tokens
        rank.num_requests -= 1

    def audit(self) -> None:
        """Check every link."""
        for link in (self._arena_link, *(rank.out for rank in self._ranks)):
            link.audit()
