# SPDX-License-Identifier: Apache-2.0
"""Plain counters of one rank. They only grow; ``/metrics`` and ``/server_info`` read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from banyan.telemetry.computed import Why


@dataclass(slots=True)
class Counters:
    """Each field's meaning is its documentation in ``/metrics``."""

    prompt_tokens: int = 0
    own_tokens: int = 0
    peer_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    computed_short_tokens: int = 0
    computed_cheaper_tokens: int = 0
    computed_refused_tokens: int = 0
    computed_gone_tokens: int = 0
    computed_new_tokens: int = 0
    computed_absent_tokens: int = 0
    computed_tail_tokens: int = 0
    parted_prompts: int = 0
    changing_line_prompts: int = 0
    lookups: int = 0
    lookup_hits: int = 0
    windowless_pages: int = 0
    plans_moved: int = 0
    plans_computed: int = 0
    fetches: int = 0
    fetches_refused: int = 0
    fetches_failed: int = 0
    fetched_pages: int = 0
    fetched_bytes: int = 0
    copied_bytes: int = 0
    copy_us: int = 0
    wait_us: int = 0
    published_pages: int = 0
    retired_pages: int = 0
    quarantined_pages: int = 0
    alloc_wait_us: int = 0
    evicted_duplicate_pages: int = 0
    evicted_last_pages: int = 0
    displaced_pages: int = 0
    peer_prompts: int = 0
    evict_looks: int = 0
    evict_us: int = 0
    threads_ended: int = 0
    resets: int = 0
    backed_up_pages: int = 0
    backups_dropped_pages: int = 0
    backups_failed: int = 0
    kept_pages: int = 0
    unkept_pages: int = 0
    reads: int = 0
    read_pages: int = 0
    read_bytes: int = 0
    read_us: int = 0
    read_failed_pages: int = 0
    reads_dropped_pages: int = 0
    questions: int = 0
    question_hits: int = 0
    questions_directed: int = 0
    questions_spared: int = 0
    remote_prefetches: int = 0
    remote_prefetches_sent: int = 0
    remote_prefetches_failed: int = 0
    pulls: int = 0
    pull_pages: int = 0
    pull_bytes: int = 0
    pull_us: int = 0
    pull_failed_pages: int = 0
    pulls_dropped_pages: int = 0
    lent_pages: int = 0
    lent_bytes: int = 0
    remote_leases_refused: int = 0
    archived_pages: int = 0
    archive_refused_pages: int = 0
    archive_failed_pages: int = 0
    taken_back_pages: int = 0
    take_backs_failed: int = 0
    handed_over_pages: int = 0
    advanced_pages: int = 0
    foreign_hand_over_messages: int = 0
    forwards: int = 0
    forward_us: int = 0
    control_us: int = 0
    placed_turn: int = 0
    placed_session: int = 0
    placed_cache: int = 0
    placed_load: int = 0
    placed_short_queue: int = 0
    placed_long_queue: int = 0
    placed_all_over: int = 0
    placed_pinned: int = 0
    placed_sglang: int = 0
    placed_hot_avoided: int = 0
    dispatch_us: int = 0
    held_us: int = 0
    held_in_vain: int = 0

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
        return {field.name: getattr(self, field.name) for field in fields(self)}


DESCRIPTIONS = {
    "prompt_tokens": "tokens of the prompts that this rank answered",
    "own_tokens": "of these, tokens cached in this rank's own pool",
    "peer_tokens": "of these, tokens fetched from another rank's pool",
    "host_tokens": "of these, tokens fetched from the host arena, those that came there from another node included",
    "store_tokens": "of these, tokens read from the store",
    "computed_short_tokens": "computed, though held elsewhere: less than --banyan-min-fetch-tokens",
    "computed_cheaper_tokens": "computed, though held elsewhere: expected to be faster, or asked for",
    "computed_refused_tokens": "computed, though held elsewhere when they were looked up: gone by then, or no room",
    "computed_gone_tokens": "computed: prompts on this node had asked for them before, and nobody held them any more",
    "computed_new_tokens": "computed: no prompt on this node had asked for them, as far as that is remembered",
    "computed_absent_tokens": "computed: nobody held them, and this rank does not remember what was asked for",
    "computed_tail_tokens": "computed at the ends of prompts: less than a page, and the last token",
    "parted_prompts": "prompts that have left the way of their session's last ones before the end of those",
    "changing_line_prompts": "of these, prompts that differ from the two before in one line at the same place",
    "lookups": "prefix tails looked up at the peers",
    "lookup_hits": "of these, tails of which a peer held at least one page",
    "windowless_pages": "pages found at the end of a tail whose window pages, or state, nobody held: computed",
    "plans_moved": "plans that move at least one page",
    "plans_computed": "plans that compute a tail although a peer held pages of it",
    "fetches": "leases granted, one for each request that fetched",
    "fetches_refused": "leases refused because a page moved after the lookup; the request was computed instead",
    "fetches_failed": "copies that did not land; SGLang aborts the requests of that batch",
    "fetched_pages": "pages copied out of a peer's pool",
    "fetched_bytes": "bytes read from peers' pools",
    "copied_bytes": "bytes written to this rank's pool, local duplicates of one fetch included",
    "copy_us": "time of the copy thread",
    "wait_us": "time the forward pass waited for a layer",
    "published_pages": "pages offered to the peers",
    "retired_pages": "pages given back by SGLang's tree or requests",
    "quarantined_pages": "of these, pages that a peer was still reading",
    "alloc_wait_us": "time allocations waited for freed pages that were not to be handed out yet",
    "evicted_duplicate_pages": "pages that left this rank's tree while a peer or the arena held them too",
    "evicted_last_pages": "pages that left this rank's tree and of which the node held no other copy",
    "displaced_pages": "pages that left this rank's tree to make room for a fetch",
    "peer_prompts": "prompts of other ranks that this rank has heard of, to know which pages are wanted again",
    "evict_looks": "leaves of this rank's tree that were looked at to choose those that left it",
    "evict_us": "time of the scheduler thread that these choices took, without SGLang's own part",
    "backed_up_pages": "pages copied from this rank's pool to the host arena",
    "backups_dropped_pages": "pages not backed up: they had left the pool, or too many waited, when there was room",
    "backups_failed": "copies to the host arena that did not land",
    "kept_pages": "pages of the host arena that a restart of the server would find again",
    "unkept_pages": "pages of the host arena that it would not find: too many were waiting for their checksum",
    "reads": "reads from the store that were started",
    "read_pages": "pages that were read from the store and verified",
    "read_bytes": "bytes read from the store",
    "read_us": "time from the first to the last of each read",
    "read_failed_pages": "pages that the store could not read, or that failed their checksum",
    "reads_dropped_pages": "pages in the store that were not read: no frame, or too many reads on their way",
    "questions": "prompts that other nodes, or a store that has to be asked, were asked for",
    "question_hits": "of these, prompts of which at least one page was there",
    "questions_directed": "of these, prompts that only the node was asked for that a router had named",
    "questions_spared": "prompts that no node was asked for: a router knew that no arena has more of them",
    "remote_prefetches": "reads of this rank's store that other nodes have asked for",
    "remote_prefetches_sent": "reads of other nodes' stores that this rank has asked for",
    "remote_prefetches_failed": "of these, reads that did not bring all pages: the rest was read here, or computed",
    "pulls": "pulls from other nodes that were started",
    "pull_pages": "pages that were pulled from other nodes and verified",
    "pull_bytes": "bytes pulled from other nodes",
    "pull_us": "time from the wish to the last byte of each pull",
    "pull_failed_pages": "pages that a node did not lend or send, or that failed their checksum",
    "pulls_dropped_pages": "pages at other nodes that were not pulled: no frame, or too many reads on their way",
    "lent_pages": "pages of the host arena that were lent to other nodes",
    "lent_bytes": "bytes of the host arena that were sent to other nodes",
    "remote_leases_refused": "questions of other nodes that were refused: other weights, pages gone, too much lent",
    "archived_pages": "pages that the store has written durably",
    "archive_refused_pages": "pages that were not worth a write, or that the store did not take",
    "archive_failed_pages": "pages that the store could not write",
    "taken_back_pages": "pages of prompts that this decode server's rank had from the arena instead of being sent them",
    "take_backs_failed": "prompts of which it had promised such pages, and could not have them: the request failed",
    "handed_over_pages": "pages that this prefill server's rank has passed to decode servers",
    "advanced_pages": "pages of these whose first layers left while later ones were computed",
    "foreign_hand_over_messages": "messages at a prefill server's control socket that no decode server sends, dropped",
    "threads_ended": "threads of Banyan's in this process that have ended by a fault: the log says what is off",
    "resets": "flushes of this rank's cache",
    "forwards": "forward passes timed by the per-layer clock",
    "forward_us": "time of these forward passes, from the first to the last layer's KV read",
    "control_us": "time the scheduler thread spent in Banyan's hooks, by hook in /server_info; layers are not counted",
    "placed_turn": "requests sent here because it was this rank's turn",
    "placed_session": "requests sent here because their session's last request went here",
    "placed_cache": "requests sent here where no other candidate held a longer prefix",
    "placed_load": "requests sent here for its load, though another rank held a longer prefix or none held any",
    "placed_short_queue": "requests sent here because the node's storage read queue was short",
    "placed_long_queue": "requests sent here though the read queue was long: that of every rank was",
    "placed_all_over": "requests sent here though above the token ceiling: every rank was",
    "placed_pinned": "requests whose client named this rank",
    "placed_sglang": "requests that SGLang's own method sent here",
    "placed_hot_avoided": "requests that came here while some other rank was left out as hot",
    "dispatch_us": "time the dispatcher spent on the requests that its policy sent here",
    "held_us": "time that the dispatcher held requests back until a rank had computed what they begin with",
    "held_in_vain": "of the requests held back, those that came here before it could be fetched",
}
