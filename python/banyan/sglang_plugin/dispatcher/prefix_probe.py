# SPDX-License-Identifier: Apache-2.0
"""What the ranks hold of a prompt, read from the directory before anybody has the request. Dispatcher process only."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from banyan import _native
from banyan.layout import Layout, cacheable_tokens
from banyan.routing.dispatcher import MAX_HASHED_PAGES
from banyan.routing.sent import MOST_PIECES, PIECE_TOKENS, SentPieces, piece_ids
from banyan.sglang_plugin.page_hash import namespace_seed

LOOK_PERIOD_S = 0.5

ON_ITS_WAY_SHARE = 0.05
"""Of a part of the arena that is full: what is being copied down has no page yet, and what was there has none any more.
"""

LEAST_REMEMBERED_CHUNKS, MOST_REMEMBERED_CHUNKS = 1 << 10, 1 << 18
"""At 16 tokens a page 3 MB and half a million tokens of prompts, 800 MB and 134 M."""


def num_remembered_chunks(num_frames: int) -> int:
    """How many chunks of hashed prompts to remember: room for twice the pages that all ranks can hold, so that what is
    held is hardly ever hashed anew, which for 2,000 pages would take 0.2 ms.
    """
    wanted = 2 * num_frames // _native.PageKeys.CHUNK_PAGES
    return min(max(1 << wanted.bit_length(), LEAST_REMEMBERED_CHUNKS), MOST_REMEMBERED_CHUNKS)


def unused_by_rank(members: Iterable[_native.Member], layout: Layout, page_tokens: int) -> dict[int, int]:
    """From what the ranks say of their frame tables; empty where a part of the arena has room. Window pages, behind
    those, are not looked at."""
    full = (member for member in members if member["slot"] < layout.first_window_slot)
    alive = {member["slot"]: member for member in full if member["alive"]}
    unused = {slot: member["num_frames"] - member["num_published"] for slot, member in alive.items()}
    parts = (slot for slot in alive if slot >= layout.num_member_slots)
    if any(unused[slot] > ON_ITS_WAY_SHARE * alive[slot]["num_frames"] for slot in parts):
        return {}
    return {
        rank: unused[member_slot] * page_tokens
        for rank, member_slot in layout.first_member_slots.items()
        if member_slot in unused
    }


@dataclass(frozen=True, slots=True)
class Found:
    """Leading tokens of a prompt that each rank holds, and that one of this node without them can get from others.

    ``prompt`` is what was looked up; None when the request's tokens do not tell. ``pieces``: the same, for what is only
    guessed of ranks on other nodes.
    """

    tokens_by_rank: tuple[int, ...] = ()
    fetchable_tokens: int = 0
    prompt: _native.PromptTokens | None = field(default=None, compare=False)
    pieces: list[bytes] = field(default_factory=list, compare=False)

    def held_by(self, rank: int) -> int:
        """Leading tokens that this rank holds."""
        return self.tokens_by_rank[rank] if rank < len(self.tokens_by_rank) else 0


def cached_as(req: Any) -> Sequence[int] | None:
    """The prompt's tokens as SGLang's caches have them, as many as ``req.input_ids``; None when the request does not
    say.

    What an image, a video or a sound becomes is numbers made of its content. Some of SGLang's processors send them
    along with the request, and the rank takes them under the same condition. Otherwise the rank makes them; or an
    encoder elsewhere sends what it becomes to the rank.
    """
    if not req.input_ids or req.input_embeds is not None or req.need_wait_for_mm_inputs:
        return None
    if req.positional_embed_overrides is not None:
        return None
    if req.mm_inputs is None:
        tokens: Sequence[int] = req.input_ids
        return tokens
    padded: Sequence[int] | None = getattr(req.mm_inputs, "padded_input_ids", None)
    return array("q", padded) if padded is not None and len(padded) == len(req.input_ids) else None


def _pieces(tokens: Sequence[int], seed: bytes | None) -> list[bytes]:
    packed = np.array(tokens[: MOST_PIECES * PIECE_TOKENS], dtype=np.int64).astype(np.int32).tobytes()
    return list(piece_ids(packed, seed or b""))


class PrefixProbe:
    """Tells, for a prompt, how long a prefix each rank holds. It reads the directory and leases nothing. Of ranks on
    other nodes, whose directory is there, it goes by what was sent to them.

    The rank table lists the shards of all ranks first, then, where there is a host arena, their parts of it. Of each
    rank one shard is looked at. A page is as large as the ranks say: SGLang may have chosen after the flags were read.
    """

    def __init__(self, rank_table: _native.RankTable, *, layout: Layout, fetches: bool, tokens_ahead: int = 0) -> None:
        """``tokens_ahead``: behind a page, on which its key depends."""
        self._rank_table = rank_table
        self._tokens_ahead = tokens_ahead
        self.layout = layout
        self.fetches = fetches
        self._first_slots = list(layout.first_member_slots.values())
        # The ranks of the dispatcher's node, the first one, are the first ones.
        self._elsewhere = {rank: SentPieces() for rank in range(layout.ranks_here.stop, layout.num_ranks)}
        self._page_tokens = 1
        self._page_keys: _native.PageKeys | None = None
        self._met: tuple[_native.Peers, _native.PageKeys] | None = None
        self._namespace = ""
        self._found_nothing = False
        self._epochs: list[int] = []
        self._unused_tokens: Mapping[int, int] = {}
        self._looks_again_s = 0.0

    def look_up(self, req: Any) -> Found:
        """What is held of the prompt; nothing when the tokens do not tell, or before the ranks have met."""
        met, tokens = self._meet(), cached_as(req)
        if met is None or tokens is None:
            return Found()
        peers, page_keys = met
        num_tokens = self.most_cached_tokens(req)
        # Prompts of a LoRA adapter hash under its id, as the rank's own request does.
        extra_key = (req.extra_key or "") + req.lora_id if req.lora_id is not None else req.extra_key
        seed = namespace_seed(extra_key, req.cache_salt)
        ahead = self._tokens_ahead
        prompt = _native.PromptTokens(seed, cast(Any, tokens[: num_tokens + ahead]), self._page_tokens, ahead)
        pages_by_slot = peers.prefix_lens_of(page_keys, prompt, MAX_HASHED_PAGES)
        self._found_nothing = not any(pages_by_slot)
        num_member_slots = self.layout.num_member_slots
        pools, arenas = pages_by_slot[:num_member_slots], pages_by_slot[num_member_slots:]
        most_fetchable = max([*(pools if self.fetches else ()), *arenas], default=0)
        held = [pools[slot] * self._page_tokens for slot in self._first_slots]
        pieces = _pieces(tokens[:num_tokens], seed) if self._elsewhere else []
        held += (min(sent.leading_tokens(pieces), num_tokens) for sent in self._elsewhere.values())
        return Found(tuple(held), most_fetchable * self._page_tokens, prompt, pieces)

    def sent(self, rank: int, found: Found) -> None:
        """The prompt goes to ``rank``: one on another node is taken to hold it from now on."""
        if rank in self._elsewhere:
            self._elsewhere[rank].sent(found.pieces)

    def has_room_for(self, rank: int, num_tokens: int) -> None:
        """So much is what a rank's pool holds."""
        if rank in self._elsewhere:
            self._elsewhere[rank].has_room_for(num_tokens)

    def unused_tokens(self, now_s: float) -> Mapping[int, int]:
        """Room in the pool of each rank that holds no page; of no rank while the arena has room for what leaves a pool.

        Looked at twice a second, for it opens every rank's frame table.
        """
        if now_s >= self._looks_again_s:
            self._looks_again_s = now_s + LOOK_PERIOD_S
            self._unused_tokens = unused_by_rank(self._rank_table.members(), self.layout, self._page_tokens)
        return self._unused_tokens

    def read_queue_tokens(self) -> dict[int, int]:
        """What each rank on this node waits for from the store, now. Its shards read alike: the first one tells."""
        reading, page_tokens = self._rank_table.reading, self._rank_table.page_tokens
        return {rank: reading(slot) * page_tokens for rank, slot in self.layout.first_member_slots.items()}

    def most_cached_tokens(self, req: Any) -> int:
        """What a cache can supply of the prompt at most."""
        return cacheable_tokens(len(req.input_ids), self._page_tokens, self._tokens_ahead)

    def _meet(self) -> tuple[_native.Peers, _native.PageKeys] | None:
        """The ranks. They are looked for again after a prompt of which nobody held anything, where one of them has said
        something new: new weights are a new namespace, and nothing is found under the old one.
        """
        if (self._met is None or self._found_nothing) and self._has_news():
            members = [member for member in self._rank_table.members() if member["alive"]]
            first_shards = [member for member in members if member["slot"] in self._first_slots]
            # One that stands apart, after an update that failed there alone, does not hide the others.
            namespaces = Counter(member["namespace"] for member in first_shards).most_common(1)
            if namespaces and namespaces[0][0] != self._namespace:
                self._namespace = namespaces[0][0]
                self._page_tokens = self._rank_table.page_tokens
                if self._page_keys is None:
                    num_chunks = num_remembered_chunks(sum(member["num_frames"] for member in members))
                    self._page_keys = _native.PageKeys(self._page_tokens, num_chunks, self._tokens_ahead)
                peers = _native.Peers(self._rank_table, None, 0, bytes.fromhex(self._namespace), [], None)
                self._met = (peers, self._page_keys)
        return self._met

    def _has_news(self) -> bool:
        before, self._epochs = self._epochs, self._rank_table.epochs()
        return self._epochs != before
