# SPDX-License-Identifier: Apache-2.0
"""One rank, put together: what its parts do with each other, beside what SGLang calls of its linker.

Hooks and features reach it as ``linker.installed()``. Scheduler thread only.

States: sharing -> ``weights_changed`` (any number of times) -> sharing -> ``stop`` (something has failed that keeps
wrong pages from being shared) -> stopped, for good.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from banyan import faults
from banyan.arena.page_source import Worth, all_that_is_found
from banyan.arena.write_back import WriteBack
from banyan.cache import PrefixCache
from banyan.core import Run, SourceKind
from banyan.routing.conversation import name_of
from banyan.routing.tenant_secret import tenants_part
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.access import Window
from banyan.sglang_plugin.pools.kind_pools import RankPools
from banyan.sglang_plugin.rank import pending, prefill, requests
from banyan.sglang_plugin.rank.all_kinds import Kinds
from banyan.sglang_plugin.rank.evicting.node_demand import NodeDemand
from banyan.sglang_plugin.rank.kind import RankSetup
from banyan.sglang_plugin.rank.layer_wait import LayerWait
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.points import Attachment
from banyan.sglang_plugin.rank.publication import Publication
from banyan.sglang_plugin.rank.reporting.figures import RankFigures
from banyan.sglang_plugin.rank.reporting.line_report import LineReport
from banyan.sglang_plugin.rank.reporting.page_tokens import PageEvent
from banyan.sglang_plugin.rank.reporting.store_events import StoreEvents
from banyan.sglang_plugin.rank.shards import Shards
from banyan.telemetry import Counters, Dropped, NodeReuse, Why


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What ``assemble`` has made."""

    setup: RankSetup
    pools: RankPools
    shards: Shards
    kinds: Kinds
    planner: RankPlanner
    cache: PrefixCache
    publication: Publication
    layer_wait: LayerWait
    demand: NodeDemand
    dropped: Dropped
    reuse: NodeReuse
    lines: LineReport
    began_s: float


class Rank:
    """``attachments`` are what features have at it."""

    is_being_updated = False
    """Whether a session of weight updates has begun and not ended."""
    has_loaded = False
    """Whether a loader has run since the last one has begun."""
    may_be_stale = False
    """Whether weights have gone past the model since the last update from disk: what it derives from them may be of
    those before."""
    is_apart = False
    """Whether an update has failed, and none from disk has begun since."""
    before_reset: bytes | None = None
    """What names the weights that /weights_checker has reset, until they are back."""

    def __init__(self, parts: RankParts) -> None:
        self.kinds, self.cache, self.counters = parts.kinds, parts.cache, parts.setup.counters
        self.demand, self.dropped = parts.demand, parts.dropped
        self.kept_in_pool = parts.setup.points.kept_in_pool
        self.ends_in_pool = parts.setup.points.ends_in_pool
        self.owners = parts.setup.points.owners
        self.answers = parts.setup.answers
        self.layer_done_counter = parts.layer_wait
        self.arena_events = parts.setup.arena_events
        self.page_tokens = parts.setup.page_tokens
        self._access, self._allocator = self.kinds.full.access, self.kinds.full.pools.allocator
        self._planner, self._shards = parts.planner, parts.shards
        self._publication, self._figures, self._lines = parts.publication, RankFigures(parts), parts.lines
        self._gone: deque[str] = deque()
        if self.can_hold_back:
            prefill.hold_back(self.kinds.full.is_awaited)
        pending.wait(self._count_passed_over)
        self.attachments: list[Attachment] = []
        for attach in parts.setup.points.attach:
            self.attachments.append(attach(self))

    # ---- what it is like ---------------------------------------------------------------------------------------

    @property
    def is_whole_rank(self) -> bool:
        """Whether this process alone decides for its rank."""
        return self._shards.is_one

    @property
    def can_hold_back(self) -> bool:
        """Whether a request may wait in the queue until somebody has answered. Shards of one rank would have to agree
        on when to go on."""
        return self._shards.is_one and self.kinds.full.follows_reads

    @property
    def num_layers(self) -> int:
        """Of the model; a draft's are not among them."""
        return self.layer_done_counter.num_layers

    @property
    def chooses_victims(self) -> bool:
        """Whether its pages are evicted by their expected reload cost: not where shards would have to choose alike, nor
        where pages of another kind go with a leaf."""
        return self.is_whole_rank and not self.kinds.beside and runtime.is_on("victims")

    @property
    def writes_back(self) -> WriteBack | None:
        """What copies pages down to the arena when they leave the pool; None where they must lie there before."""
        full = self.kinds.full
        if full.tier is None or self.cache.is_stopped or not full.may_write_back:
            return None
        return full.tier.backup.write_back

    @property
    def num_frames(self) -> int:
        """Of the rank's pool."""
        return int(self._allocator.num_pages)

    def frames(self, slots: torch.Tensor) -> Any:
        """Page numbers of whole pages of ``slots``, as copies into the pool take them."""
        return self._access.frames(slots)

    def move_share(self, kind: SourceKind) -> float | None:
        """What it takes to have an evicted prefix again, over computing it; None while it was not measured."""
        return self._planner.move_share(kind)

    # ---- requests and pages ------------------------------------------------------------------------------------

    def arrive(self, request: str) -> None:
        """A request has come to this rank's queue: remember what it asks for, and let the tiers below prepare."""
        keys = requests.prompt_keys(request, self.page_tokens)
        if not keys:
            return
        requests.when_gone(request, self._gone.append)
        self.owners.asked(requests.salt_of(request), keys)
        pages = self.demand.tell(keys)
        asked_before = self.demand.asked(pages, request) * self.page_tokens if self.chooses_victims else None
        requests.note_prompt(request, pages, asked_before, self._lines.saw)
        if asked_before is not None and asked_before < len(keys) * self.page_tokens:
            requests.note_new(request, len(keys), self.page_tokens)
        self._judge_answers(request, keys)
        if getattr(requests.find(request), "session", None) is not None:
            # Aborted or refused in the queue, it would wait until a client closes the session: SGLang keeps it there.
            self.demand.served(request)
        if self.cache.is_stopped:
            # Nobody asks for what would be read.
            return
        full = self.kinds.full
        full.residency_report.asked(len(keys))
        if not self.kinds.have_tiers or (full.guards_adapters and requests.is_of_this_server(request)):
            return
        full.residency_report.saw(request, keys)
        may_read = full.tier is not None and full.tier.sources
        self.kinds.arrive(request, keys, self.worth_of(request) if may_read else all_that_is_found)

    def worth_of(self, request: str) -> Worth:
        """How much of what is found of a request's prompt is to be read, whatever SGLang is going to ask for."""
        return partial(self._planner.num_to_read, requests.facts_of_all_pages(request, self.page_tokens))

    def choose_read(self, request: str, num_missing: int, found: Sequence[Run]) -> int:
        """Which of several nodes' pages of a request's prompt are to be read; the longest of ``found`` comes first.
        Shards of one rank would have to choose alike: only what all of them have got is of use."""
        if not self.is_whole_rank:
            return 0
        facts = requests.facts_of_all_pages(request, self.page_tokens)
        return self._planner.choose_read(facts, num_missing, found)

    def computed(self, req: Any, cached_tokens: int) -> dict[Why, int]:
        """The answer of a request has begun, and so many tokens of its prompt were cached: why the others were
        computed. Each is counted."""
        request = requests.id_of(req)
        reasons = requests.why_computed(req, cached_tokens, self.page_tokens, self._planner.why_unmoved(request))
        self.counters.count_computed(reasons)
        pages = requests.pages_of(req)
        self.demand.answered(len(req.origin_input_ids), pages, cached_tokens // self.page_tokens)
        self._planner.computed(request, reasons)
        return reasons

    def _count_passed_over(self) -> None:
        self.counters.passed_over_requests += 1

    def _forget_gone(self) -> None:
        """SGLang has forgotten these requests. It says so wherever the collector runs, in the middle of anything."""
        while self._gone:
            request = self._gone.popleft()
            self.cache.forget(request)
            self._planner.forget(request)
            self.demand.served(request)

    def offer_again(self, keys: list[str], full: torch.Tensor, beside: tuple[list[str], torch.Tensor]) -> None:
        """A node that was offered before has pages of the kind beside full ones again, at other slots than before;
        maybe full pages too."""
        (kind,) = self.kinds.beside
        self._publication.announce(keys)
        self._access.offer_again(full, keys, kind.node(*beside))

    def _offload(self, full: Any, beside: list[Any]) -> bool:
        """Pages have entered SGLang's tree: offer them once they are complete. Of a node whose window SGLang has freed
        there are full pages only."""
        self._publication.announce(full.keys)
        self.owners.entered(full.keys)
        self.demand.came(full.keys)
        window: Window | None = None
        for kind, transfer in zip(self.kinds.beside, beside, strict=False):
            window = kind.node(transfer.keys, transfer.device_indices)
        is_offered = self._access.offload(full.device_indices, full.keys, window)
        self._note_answer()
        return is_offered

    def _judge_answers(self, request: str, keys: list[str]) -> None:
        """What its prompt leaves out of answers of before goes first."""
        left_out = self.answers.asked(self._owner(requests.salt_of(request)), keys)
        tier = self.kinds.full.tier
        if left_out and tier is not None:
            tier.residency.demote(left_out)

    def _note_answer(self) -> None:
        answer = requests.inserted_answer(self.page_tokens)
        if answer is not None:
            cache_salt, prompt_end, keys = answer
            self.answers.given(self._owner(cache_salt), prompt_end, keys)

    def _owner(self, cache_salt: str | None) -> str | None:
        """Whose answers they are: a tenant's, whatever its clients choose besides. Nobody keeps a client's text."""
        if not cache_salt:
            return None
        return name_of(tenants_part(cache_salt, self.kinds.full.config.tenant_secret_file))

    def _poll(self) -> None:
        self._planner.step_begins()
        if self._gone:
            self._forget_gone()
        self._access.poll()
        self.cache.poll()
        self._poll_tiers()
        for attachment in self.attachments:
            attachment.poll()

    def _poll_tiers(self) -> None:
        self.kinds.poll()

    # ---- life --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Share nothing from now on."""
        self.layer_done_counter.wait_for(self.cache.stop())
        for attachment in self.attachments:
            attachment.stop()

    def weights_changed(self, change: str = "update") -> None:
        """Leave the old weights' namespace, and meet only peers whose weights have gone through the same.

        Pages that stay in SGLang's tree (an update without a flush) belong to it: they are withdrawn, not freed. They,
        and what is computed on them, are published to nobody until the tree has been emptied.

        Raises:
            RuntimeError: when a peer does not stop reading the old pages.
        """
        # First: they have changed, whether or not the old pages can be left.
        for kind in self.kinds:
            kind.note_change(change)
        self._quiesce()
        self.demand.weights_changed()
        self.kinds.leave()
        self._move()

    def weights_are(self, digest: str) -> None:
        """As ``weights_changed``, and what they are is known: meet whoever has the same, on other servers too."""
        self._quiesce()
        self.kinds.leave()
        # Now only: pages that cannot be left are not to have that name.
        for kind in self.kinds:
            kind.note_content(digest)
        self._move()

    def _move(self) -> None:
        self.answers.forget()
        self.cache.move_to([kind.join for kind in self.kinds])
        if self._allocator.available_size() < self._allocator.num_pages * self.page_tokens:
            self.hold_back("the weights changed while pages of the old ones were in use")
        else:
            self._start_anew()

    def _start_anew(self) -> None:
        """No page of this rank is in use."""
        self._publication.start_anew()
        if self.is_being_updated:
            # A trainer may write them past all loaders, those of one rank before another's.
            self.hold_back("a session of weight updates is open")

    def hold_back(self, why: str) -> None:
        """Publish nothing until the cache has been flushed. Any thread."""
        self._publication.hold_back(why)

    @property
    def weights_epoch(self) -> int:
        """How often the weights have changed since the start."""
        return self.kinds.full.weights_epoch

    @property
    def weights_name(self) -> str:
        """That of all pages that this rank holds; "" where it has none, or not all were computed with these weights."""
        return "" if self._publication.why_silent else self.kinds.full.weights_name

    def stand_apart(self) -> None:
        """The weights have changed in part, nobody knows into what: share with no other rank."""
        self.is_apart = True
        self.weights_changed(uuid.uuid4().hex)

    def meet_again(self) -> None:
        """All weights are about to be loaded: what they have gone through before does not count."""
        self.is_apart = self.may_be_stale = False
        for kind in self.kinds:
            kind.meet_again()

    def withdraw(self) -> None:
        """Lend nothing any more of what this rank holds now, above and below: it was to go, and SGLang cannot let it go
        yet. What enters its tree from now on is published, and what SGLang offers again: a node that was on its way, or
        one that gets its window back.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self._access.give_up_offloads()
        self._quiesce()
        self.kinds.withdraw()

    def _quiesce(self) -> None:
        """Nothing of this rank is queued or under way any more."""
        self.cache.quiesce()
        for attachment in self.attachments:
            attachment.quiesce()
        for kind in self.kinds:
            kind.access.wait_for_copies()
        self.cache.poll()

    def _empty(self) -> None:
        """SGLang has emptied its tree. The tiers first: their copies read the pool under leases."""
        self._quiesce()
        self.kinds.empty()
        self.cache.reset()
        self._access.forget()
        self._start_anew()

    def _close(self) -> None:
        self._quiesce()
        for kind in self.kinds:
            kind.leave_tier(for_good=True)
        self.cache.reset()
        for kind in self.kinds:
            kind.close()

    # ---- what it tells -----------------------------------------------------------------------------------------

    def counters_now(self) -> Counters:
        """The counters, with the control time up to this moment."""
        return self._figures.counters_now()

    def figures(self) -> dict[str, Any]:
        """What this rank is like now, and cheap to tell: for ``/metrics``."""
        figures = self._figures.gauges()
        for attachment in self.attachments:
            figures |= attachment.figures()
        return figures

    @property
    def _store_events(self) -> StoreEvents | None:
        tier = self.kinds.full.tier
        return None if tier is None else tier.store_events

    def take_events(self, own: Sequence[PageEvent]) -> list[PageEvent]:
        """KV events of the tiers below the pool, since the last call; ``own``: SGLang's of the pool."""
        if self.arena_events is None:
            return []
        store_events = self._store_events
        return [*self.arena_events.take(own), *(store_events.take() if store_events is not None else ())]

    def state(self) -> dict[str, Any]:
        """This rank's part of ``/server_info``."""
        state = {
            **self._figures.state(),
            **self._lines.state(),
            "tells_arena": self.arena_events is not None,
            "tells_store": store_events.store_id if (store_events := self._store_events) is not None else "",
            "hook_failures": faults.counts(),
            "features_off": runtime.features_off(),
        }
        for attachment in self.attachments:
            state |= {**attachment.figures(), **attachment.state()}
        return state
