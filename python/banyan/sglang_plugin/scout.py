# SPDX-License-Identifier: Apache-2.0
"""What the ranks hold of a prompt, read from the directory before anybody has the request. Dispatcher process only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from banyan import _native
from banyan.directory import MAX_HASHED_PAGES
from banyan.sglang_plugin.page_hash import namespace_seed

LEAST_REMEMBERED_CHUNKS, MOST_REMEMBERED_CHUNKS = 1 << 14, 1 << 18
"""At 16 tokens a page 50 MB and 8 M tokens of prompts, 800 MB and 134 M."""


def num_remembered_chunks(num_frames: int) -> int:
    """How many chunks of hashed prompts to remember: room for twice the pages that all ranks can hold, so that what is
    held is hardly ever hashed anew, which for 2,000 pages would take 0.2 ms.
    """
    wanted = 2 * num_frames // _native.PageKeys.CHUNK_PAGES
    return min(max(1 << wanted.bit_length(), LEAST_REMEMBERED_CHUNKS), MOST_REMEMBERED_CHUNKS)


@dataclass(frozen=True, slots=True)
class Found:
    """Leading tokens of a prompt that each rank holds, and that a rank without them can get from others.

    ``prompt`` is what was looked up; None when the request's tokens do not tell.
    """

    tokens_by_rank: tuple[int, ...] = ()
    fetchable_tokens: int = 0
    prompt: _native.PromptTokens | None = field(default=None, compare=False)


def is_told_by_tokens(req: Any) -> bool:
    """Whether the tokens are the whole prompt: what an image or an embedding becomes is not in them."""
    return bool(req.input_ids) and req.mm_inputs is None and req.input_embeds is None


class PrefixScout:
    """Tells, for a prompt, how long a prefix each rank holds. It reads the directory and leases nothing.

    The roster seats the shards of all ranks first, then, where there is a host arena, their parts of it.
    """

    def __init__(
        self, roster: _native.Roster, *, num_ranks: int, tp_size: int, page_tokens: int, fetches: bool
    ) -> None:
        self._roster = roster
        self._num_shards = num_ranks * tp_size
        self.fetches = fetches
        self._tp_size = tp_size
        self._page_tokens = page_tokens
        self._page_keys: _native.PageKeys | None = None
        self._met: tuple[_native.Peers, _native.PageKeys] | None = None
        self._namespace = ""
        self._found_nothing = False

    def look_up(self, req: Any) -> Found:
        """What is held of the prompt; nothing when the tokens do not tell, or before the ranks have met.

        The last token is never counted: a rank computes it to have something to sample from.
        """
        met = self._meet()
        if met is None or not is_told_by_tokens(req):
            return Found()
        peers, page_keys = met
        num_tokens = self.most_cached_tokens(req)
        # Prompts of a LoRA adapter hash under its id, as the rank's own request does.
        extra_key = (req.extra_key or "") + req.lora_id if req.lora_id is not None else req.extra_key
        seed = namespace_seed(extra_key, req.cache_salt)
        prompt = _native.PromptTokens(seed, req.input_ids[:num_tokens], self._page_tokens)
        pages_by_slot = peers.prefix_lens_of(page_keys, prompt, MAX_HASHED_PAGES)
        self._found_nothing = not any(pages_by_slot)
        pools, arenas = pages_by_slot[: self._num_shards], pages_by_slot[self._num_shards :]
        most_fetchable = max([*(pools if self.fetches else ()), *arenas], default=0)
        return Found(
            tuple(num * self._page_tokens for num in pools[:: self._tp_size]),
            most_fetchable * self._page_tokens,
            prompt,
        )

    def most_cached_tokens(self, req: Any) -> int:
        """What a cache can supply of the prompt at most: its whole pages before the last token."""
        return (len(req.input_ids) - 1) // self._page_tokens * self._page_tokens

    def _meet(self) -> tuple[_native.Peers, _native.PageKeys] | None:
        """The ranks. They are looked for again after a prompt of which nobody held anything: new weights are a new
        namespace, and nothing is found under the old one.
        """
        if self._met is None or self._found_nothing:
            ranks = [member for member in self._roster.members() if member["alive"]]
            if ranks and ranks[0]["namespace"] != self._namespace:
                self._namespace = ranks[0]["namespace"]
                if self._page_keys is None:
                    num_chunks = num_remembered_chunks(sum(member["num_frames"] for member in ranks))
                    self._page_keys = _native.PageKeys(self._page_tokens, num_chunks)
                peers = _native.Peers(self._roster, None, 0, bytes.fromhex(self._namespace), [], None)
                self._met = (peers, self._page_keys)
        return self._met
