# SPDX-License-Identifier: Apache-2.0
"""How much may be on its way between the pool and the arena at once: pure."""

from __future__ import annotations

WINDOW_S = 0.1
"""What the link moves in this time may be queued on it."""

MAX_ARENA_SHARE = 4
"""Frames that are being filled serve nobody: a quarter of the arena at most."""


def window_bytes(least: int, *, link_bytes_per_s: float, arena_bytes: int) -> int:
    """``least`` is enough where nobody has measured the link: 0 bytes a second."""
    return max(least, min(round(link_bytes_per_s * WINDOW_S), arena_bytes // MAX_ARENA_SHARE))
