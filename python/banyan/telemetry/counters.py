# SPDX-License-Identifier: Apache-2.0
"""Plain counters of one rank. They only grow; ``/metrics`` and ``/server_info`` read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from banyan.telemetry.computed import Why

TEXT = "text"


def _of(text: str) -> Any:
    """A counter of what ``text`` says, which is its documentation in ``/metrics``."""
    return field(default=0, metadata={TEXT: text})


@dataclass(slots=True)
class Counters:
    """What a rank has counted since its start."""

    prompt_tokens: int = _of("tokens of the prompts that this rank answered")
    own_tokens: int = _of("of these, tokens cached in this rank's own pool")
    peer_tokens: int = _of("of these, tokens fetched from another rank's pool")
    host_tokens: int = _of(
        "of these, tokens fetched from the host arena, those that came there from another node included"
    )
    store_tokens: int = _of("of these, tokens read from the store")
    computed_short_tokens: int = _of("computed, though held elsewhere: less than --banyan-min-fetch-tokens")
    computed_cheaper_tokens: int = _of("computed, though held elsewhere: expected to be faster, or asked for")
    computed_refused_tokens: int = _of(
        "computed, though held elsewhere when they were looked up: gone by then, or no room"
    )
    computed_gone_tokens: int = _of(
        "computed: prompts on this node had asked for them before, and nobody held them any more"
    )
    computed_new_tokens: int = _of("computed: no prompt on this node had asked for them, as far as that is remembered")
    computed_absent_tokens: int = _of("computed: nobody held them, and this rank does not remember what was asked for")
    computed_tail_tokens: int = _of(
        "computed at the ends of prompts: less than a page, the last token, and a page where that would be alone"
    )
    parted_prompts: int = _of("prompts that have left the way of their session's last ones before the end of those")
    changing_line_prompts: int = _of("of these, prompts that differ from the two before in one line at the same place")
    lookups: int = _of("requests whose tail was looked up at the peers")
    lookup_hits: int = _of("of these, requests for which a look found at least one page")
    windowless_pages: int = _of(
        "pages found at the end of a request's tail, the most of its looks, whose window pages, or state, nobody held"
    )
    plans_moved: int = _of("requests answered whose last plan moved at least one page")
    plans_computed: int = _of("requests answered whose last plan computed a tail although a peer held pages of it")
    fetches: int = _of("requests whose fetch was begun, under leases")
    fetches_refused: int = _of("leases refused because a page moved after the lookup; the request was computed instead")
    fetches_failed: int = _of(
        "copies that did not land: their requests are run again without the cache, or end with 503"
    )
    fetched_pages: int = _of("pages copied out of a peer's pool")
    fetched_bytes: int = _of("bytes read from peers' pools")
    copied_bytes: int = _of("bytes written to this rank's pool, local duplicates of one fetch included")
    copy_us: int = _of("time of the copy thread")
    wait_us: int = _of("time the forward pass waited for a layer; 0 on GPUs, where streams wait")
    published_pages: int = _of("pages offered to the peers")
    retired_pages: int = _of("pages given back by SGLang's tree or requests")
    quarantined_pages: int = _of("of these, pages that a peer, or a copy down to the arena, still read")
    alloc_wait_us: int = _of("time allocations waited for freed pages that were not to be handed out yet")
    evicted_duplicate_pages: int = _of("pages that left this rank's tree and are at a peer, or in the arena")
    evicted_last_pages: int = _of("pages that left this rank's tree and were the last copies of the node")
    displaced_pages: int = _of("pages that left this rank's tree to make room for a fetch")
    peer_prompts: int = _of("prompts of other ranks that this rank has heard of, to know which pages are wanted again")
    evict_looks: int = _of("leaves of this rank's tree that were looked at to choose those that left it")
    evict_us: int = _of("time of the scheduler thread that these choices took, without SGLang's own part")
    backed_up_pages: int = _of("pages copied from this rank's pool to the host arena")
    backups_dropped_pages: int = _of(
        "pages not backed up: they had left the pool, or too many waited, when there was room"
    )
    backups_failed: int = _of("copies to the host arena that did not land")
    kept_pages: int = _of("pages of the host arena that a restart of the server would find again")
    unkept_pages: int = _of("pages of the host arena that it would not find: too many were waiting for their checksum")
    reads: int = _of("reads from the store that were started")
    read_pages: int = _of("pages that were read from the store and verified")
    read_bytes: int = _of("bytes read from the store")
    read_us: int = _of("time from the first to the last of each read")
    read_failed_pages: int = _of(
        "pages asked of the store that did not come: overwritten, late, cut off by a flush, unreadable, or damaged"
    )
    reads_dropped_pages: int = _of("pages in the store that were not read: no frame, or too many reads on their way")
    resharded_pages: int = _of("of the pages read from the store, those put together from what another --tp has stored")
    resharded_bytes: int = _of("bytes read from the store for them")
    resharded_us: int = _of("time that reading them and putting them together took")
    questions: int = _of("prompts that other nodes, or a store that has to be asked, were asked for")
    question_hits: int = _of("of these, prompts of which at least one page was there")
    questions_directed: int = _of("of these, prompts that only the node was asked for that a router had named")
    questions_spared: int = _of("prompts that no node was asked for: a router knew that no arena has more of them")
    remote_prefetches: int = _of("reads of this rank's store that other nodes have requested")
    remote_prefetches_sent: int = _of("reads of other nodes' stores that this rank has requested")
    remote_prefetches_failed: int = _of(
        "of these, reads that did not bring all pages: the rest was read here, or computed"
    )
    pulls: int = _of("pulls from other nodes that were started")
    pull_pages: int = _of("pages that were pulled from other nodes and verified")
    pull_bytes: int = _of("bytes pulled from other nodes")
    pull_us: int = _of("time from the wish to the last byte of each pull")
    pull_failed_pages: int = _of("pages that a node did not lend or send, or that failed their checksum")
    pulls_dropped_pages: int = _of(
        "pages at other nodes that were not pulled: no frame, or too many reads on their way"
    )
    lent_pages: int = _of("pages of the host arena that were lent to other nodes")
    lent_bytes: int = _of("bytes of the host arena that were sent to other nodes")
    remote_leases_refused: int = _of(
        "questions of other nodes that were refused: other weights, pages gone, too much lent"
    )
    archived_pages: int = _of("pages that the store has written durably")
    archive_refused_pages: int = _of("pages that were not worth a write, or that the store did not take")
    archive_over_budget_pages: int = _of("of these, pages for which the day's allowance of writes had nothing left")
    archive_failed_pages: int = _of("pages that the store could not write")
    taken_back_pages: int = _of(
        "pages of prompts that this decode server's rank had from the arena instead of being sent them"
    )
    take_backs_failed: int = _of(
        "prompts of which it had promised such pages, and could not have them: the request failed"
    )
    handed_over_pages: int = _of("pages that this prefill server's rank has passed to decode servers")
    advanced_pages: int = _of("pages of these whose first layers left while later ones were computed")
    foreign_hand_over_messages: int = _of(
        "messages at the control socket of a pair's server that the other one does not send, dropped"
    )
    threads_ended: int = _of("threads of Banyan's in this process that have ended by a fault: the log says what is off")
    resets: int = _of("flushes of this rank's cache")
    forwards: int = _of("forward passes timed by the per-layer clock")
    forward_us: int = _of("time of these forward passes, to the last layer's KV read; on GPUs time to launch them")
    control_us: int = _of(
        "time the scheduler thread spent in Banyan's hooks, by hook in /server_info; layers are not counted"
    )
    placed_turn: int = _of("requests sent here because it was this rank's turn")
    placed_session: int = _of("requests sent here because their session's last request went here")
    placed_cache: int = _of("requests sent here where no other candidate held a longer prefix")
    placed_load: int = _of("requests sent here for its load, though another rank held a longer prefix or none held any")
    placed_short_queue: int = _of("requests sent here because the node's storage read queue was short")
    placed_long_queue: int = _of("requests sent here though the read queue was long: that of every rank was")
    placed_all_over: int = _of("requests sent here though above the token ceiling: every rank was")
    placed_pinned: int = _of("requests whose client named this rank")
    placed_sglang: int = _of("requests that SGLang's own method sent here")
    placed_hot_avoided: int = _of("requests that came here while some other rank was left out as hot")
    dispatch_us: int = _of("time the dispatcher spent on the requests that its policy sent here")
    held_us: int = _of("time that the dispatcher held requests back until a rank had computed what they begin with")
    held_in_vain: int = _of("of the requests held back, those that came here before it could be fetched")
    passed_over_requests: int = _of(
        "requests that waited in this rank's queue while what they begin with was computed or moved for others"
    )

    def count_placed(self, reason: str) -> None:
        """Count a request that came here for ``reason``, one of ``banyan.routing.Reason``.

        Raises:
            AttributeError: for a reason that has no counter.
        """
        self.add(f"placed_{reason}", 1)

    def add(self, name: str, number: int) -> None:
        """Count under a name that is put together.

        Raises:
            AttributeError: for a name that is no counter.
        """
        setattr(self, name, getattr(self, name) + number)

    @property
    def num_evicted_pages(self) -> int:
        """Pages that have left the tree to make room."""
        return self.evicted_duplicate_pages + self.evicted_last_pages

    def count_prompt(self, num_tokens: int, *, own: int, peer: int, host: int, store: int) -> None:
        """Count a prompt that is being answered, and its tokens that were cached, by where they were."""
        self.prompt_tokens += num_tokens
        self.own_tokens += own
        self.peer_tokens += peer
        self.host_tokens += host
        self.store_tokens += store

    def count_computed(self, reasons: Mapping[Why, int]) -> None:
        """Count the other tokens of that prompt, by why they were computed."""
        for why, num_tokens in reasons.items():
            self.add(f"computed_{why.value}_tokens", num_tokens)

    def as_dict(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


DESCRIPTIONS: dict[str, str] = {one.name: one.metadata[TEXT] for one in fields(Counters)}
"""What each counts, by its name."""
