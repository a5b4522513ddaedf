# SPDX-License-Identifier: Apache-2.0
"""How much may be on its way to the arena at once, from the pool and from the store, and in which steps the store is
read: pure."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 0.1
"""What the link to the pool moves in this time may be queued on it."""

MAX_BACKUP_SHARE = 4
"""Frames that are being filled serve nobody: a quarter of the arena at most."""

MAX_READ_SHARE = 2
"""A prefix that does not find frames is computed, which takes longer than to read it: half of the arena. The other half
is for the other requests."""

LEAST_BACKUP_BYTES = 256 << 20
"""Some 700 pages of a small model."""

LEAST_READ_BYTES = 1 << 30

LEAST_STEP_BYTES = 128 << 10
"""Of a page. A drive that is asked for 12 KiB at a time gives less than half of what it gives with this
(docs/design/0010-store.md); a forward waits for the first step that much longer."""


def backup_limit_bytes(*, link_bytes_per_s: float, arena_bytes: int) -> int:
    """From the pool; the least that is sensible where nobody has measured the link: 0 bytes a second."""
    return max(LEAST_BACKUP_BYTES, min(round(link_bytes_per_s * WINDOW_S), arena_bytes // MAX_BACKUP_SHARE))


def read_limit_bytes(*, arena_bytes: int) -> int:
    """From the store and from other nodes. A small arena is lent whole."""
    return max(LEAST_READ_BYTES, arena_bytes // MAX_READ_SHARE)


def layers_per_read(wished: int | None, layer_bytes: Sequence[int]) -> int:
    """Layers in one submission over all pages of a prompt, at most the page's. ``wished``: 0 for whole pages, None for
    as few as make ``LEAST_STEP_BYTES`` of a page."""
    num_layers = len(layer_bytes)
    if wished is None:
        return min(num_layers, -(-LEAST_STEP_BYTES * num_layers // sum(layer_bytes)))
    return min(wished, num_layers) or num_layers
