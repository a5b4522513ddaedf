# SPDX-License-Identifier: Apache-2.0
"""How much may be on its way to the arena at once, from the pool and from the store: pure."""

from __future__ import annotations

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


def backup_limit_bytes(*, link_bytes_per_s: float, arena_bytes: int) -> int:
    """From the pool; the least that is sensible where nobody has measured the link: 0 bytes a second."""
    return max(LEAST_BACKUP_BYTES, min(round(link_bytes_per_s * WINDOW_S), arena_bytes // MAX_BACKUP_SHARE))


def read_limit_bytes(*, arena_bytes: int) -> int:
    """From the store and from other nodes. A small arena is lent whole."""
    return max(LEAST_READ_BYTES, arena_bytes // MAX_READ_SHARE)
