# SPDX-License-Identifier: Apache-2.0
"""What belongs to a page: for each layer its extents, by name and size.

A state is a page too, of a pool of its own: of one slot instead of several tokens.

Everything that depends on it reads this one description: where extents lie in a pool, what travels between pools, how
large a frame of the arena and a record of the store are, which pages may be exchanged, and what is said of a model
before it is loaded. An extent's buffers have the page's own number: page p of the pool is page p of each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEYS, VALUES, LATENTS, INDEX_KEYS = "keys", "values", "latents", "index keys"
RECURRENT_STATES, CONVOLUTION_INPUTS = "recurrent states", "convolution inputs"
COMPRESSED_LATENTS, COMPRESSOR_STATES, INDEXER_STATES = "latents of", "compressor states", "indexer states"
DRAFT = "draft"
INDEX_SCALE_BYTES = 4
INDEX_BLOCK = 128
"""Values of an index key that share a scale of 4 bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """One buffer of one layer: what it holds, and its bytes of a page."""

    name: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The parts of each layer, in layer order."""

    layers: tuple[tuple[Part, ...], ...]

    def __post_init__(self) -> None:
        sizes = [part.page_bytes for parts in self.layers for part in parts]
        if not self.layers or not all(self.layers) or min(sizes) < 1:
            raise ValueError(f"no page of {len(self.layers)} layers, {sizes[:4]} bytes")

    @classmethod
    def of_layers(cls, num_layers: int, *parts: Part) -> PageLayout:
        """``num_layers`` equal layers."""
        return cls((parts,) * num_layers)

    @classmethod
    def of_heads(
        cls,
        *,
        num_layers: int,
        page_tokens: int,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        element_bytes: int,
    ) -> PageLayout:
        """Multi-head or grouped-query attention: keys and values of ``num_heads`` heads."""
        row = page_tokens * num_heads * element_bytes
        return cls.of_layers(num_layers, Part(KEYS, row * head_dim), Part(VALUES, row * value_dim))

    @classmethod
    def of_latents(cls, *, num_layers: int, page_tokens: int, row_bytes: int, index_dim: int = 0) -> PageLayout:
        """Latent attention: one row for all heads. With ``index_dim`` a quantised key of an indexer beside it."""
        parts = [Part(LATENTS, page_tokens * row_bytes)]
        if index_dim:
            key_bytes = index_dim + index_dim // INDEX_BLOCK * INDEX_SCALE_BYTES
            parts.append(Part(INDEX_KEYS, page_tokens * key_bytes))
        return cls.of_layers(num_layers, *parts)

    @classmethod
    def of_states(cls, *, num_layers: int, recurrent_bytes: int, convolution_bytes: Sequence[int]) -> PageLayout:
        """Linear attention or a state space: one state of each layer, whatever the tokens before it. Some models have
        no recurrent part, and some several convolutions."""
        parts = [Part(RECURRENT_STATES, recurrent_bytes)] if recurrent_bytes else []
        single = len(convolution_bytes) == 1
        parts += [
            Part(CONVOLUTION_INPUTS if single else f"{CONVOLUTION_INPUTS} {number}", num_bytes)
            for number, num_bytes in enumerate(convolution_bytes)
        ]
        return cls.of_layers(num_layers, *parts)

    def followed_by(self, drafts: Iterable[PageLayout]) -> PageLayout:
        """Its layers, and behind them those of ``drafts``, whose parts are told from its own by their names."""
        layers = [layer for draft in drafts for layer in draft.layers]
        named = (tuple(Part(f"{DRAFT} {part.name}", part.page_bytes) for part in layer) for layer in layers)
        return PageLayout((*self.layers, *named))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(self.bytes_by_name.values())

    @property
    def bytes_by_name(self) -> dict[str, int]:
        """What each kind of extent weighs over all layers."""
        total: Counter[str] = Counter()
        for parts in self.layers:
            for part in parts:
                total[part.name] += part.page_bytes
        return dict(total)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of each extent of each layer."""
        return tuple(tuple(part.page_bytes for part in parts) for parts in self.layers)

    def identity(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """What two pools must have in common to exchange pages: names and sizes, without places and capacity."""
        return tuple(tuple((part.name, part.page_bytes) for part in parts) for parts in self.layers)


def cacheable_tokens(num_tokens: int, page_tokens: int = 1, tokens_ahead: int = 0) -> int:
    """What a cache can supply of a prompt of ``num_tokens``, in whole pages: all but the last token, which a rank
    computes to have something to sample from. Of what is left, ``tokens_ahead`` belong to no page: its key depends on
    so many tokens behind it."""
    return max(num_tokens - 1 - tokens_ahead, 0) // page_tokens * page_tokens
