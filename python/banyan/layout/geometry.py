# SPDX-License-Identifier: Apache-2.0
"""Where each page of each layer lies in a rank's pool.

A pool is one run of bytes. Layer l has one extent for each part of its page (``banyan.layout.page``), and page p of an
extent starts at ``base_bytes + p * page_bytes``. Two pools may exchange pages when they agree in everything but the
bases and the number of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.layout.page import PageLayout

ALIGNMENT_BYTES = 4096
"""Extents start on memory pages, so that a pool can be registered for DMA extent by extent."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One buffer of one layer: ``num_pages`` pages of ``page_bytes`` from ``base_bytes`` on."""

    base_bytes: int
    page_bytes: int
    num_pages: int

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def end_bytes(self) -> int:
        return self.base_bytes + self.num_bytes


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The extents of every layer of ``page``, in its order."""

    page: PageLayout
    layers: tuple[tuple[Extent, ...], ...]

    @classmethod
    def stacked(cls, page: PageLayout, num_pages: int, *, base_bytes: int = 0) -> PoolGeometry:
        """Layers one after another, from ``base_bytes`` on; within a layer one extent for each part.

        The extents of a layer are adjacent and only the layer is aligned: SGLang views K and V of one shape as the
        two halves of one tensor.

        Raises:
            ValueError: when there is no page.
        """
        if num_pages < 1:
            raise ValueError(f"no pool of {num_pages} pages")
        layers = []
        end = base_bytes
        for parts in page.layers:
            base = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            extents = []
            for part in parts:
                extents.append(Extent(base, part.page_bytes, num_pages))
                base = extents[-1].end_bytes
            layers.append(tuple(extents))
            end = base
        return cls(page, tuple(layers))

    @classmethod
    def by_part(cls, page: PageLayout, num_pages: int) -> PoolGeometry:
        """The same part of all layers in one extent, layer after layer, and the parts one behind the other: SGLang has
        one tensor for each part of a state.

        Raises:
            ValueError: when there is no page, or layers have other parts than the first.
        """
        if num_pages < 1 or any(layer != page.layers[0] for layer in page.layers):
            raise ValueError(f"no pool of {num_pages} pages whose layers are alike")
        columns, end = [], 0
        for part in page.layers[0]:
            base = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            extents = [
                Extent(base + layer * num_pages * part.page_bytes, part.page_bytes, num_pages)
                for layer in range(len(page.layers))
            ]
            end = extents[-1].end_bytes
            columns.append(extents)
        return cls(page, tuple(zip(*columns, strict=True)))

    def followed_by(self, drafts: Sequence[PoolGeometry]) -> PoolGeometry:
        """The layers of this pool, and behind them those of its drafts, each where it lies.

        Raises:
            ValueError: when a draft has fewer pages, or does not lie behind what comes before it.
        """
        end = self.num_bytes
        for draft in drafts:
            if draft.num_pages < self.num_pages or draft.layers[0][0].base_bytes < end:
                raise ValueError(f"a draft of {draft.num_pages} pages does not lie behind {self.num_pages} pages")
            end = draft.num_bytes
        page = self.page.followed_by(draft.page for draft in drafts)
        return PoolGeometry(page, (*self.layers, *(layer for draft in drafts for layer in draft.layers)))

    @property
    def num_pages(self) -> int:
        return self.layers[0][0].num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes to the end of the pool, padding included."""
        return self.layers[-1][-1].end_bytes

    def table(self) -> list[list[tuple[int, int]]]:
        """``(base_bytes, page_bytes)`` for each extent of each layer: the form the native core takes."""
        return [[(extent.base_bytes, extent.page_bytes) for extent in extents] for extents in self.layers]
