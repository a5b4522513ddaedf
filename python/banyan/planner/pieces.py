# SPDX-License-Identifier: Apache-2.0
"""Where a long run of new pages is cut, so that a full pool need not lose all of it at once.

SGLang keeps what a prompt brings as one node of its tree, and evicts a leaf as a whole. In a pool of a few prompts that
is much more than the room that is wanted: 100 pages are asked for, 150 go. And a prompt that lost all is found by
nobody, where one that lost its tail still gives its beginning. Each cut costs another look along the prompt, so there
are few.
"""

from __future__ import annotations

PIECES_PER_POOL = 64
"""Nothing shorter is cut off: what goes beyond the room that is wanted is a 64th of the pool at most."""

MOST_PIECES = 5
"""Of one run. See docs/design/0014."""


def least_piece(num_frames: int) -> int:
    """Pages of a piece, in a pool of so many frames."""
    return max(1, num_frames // PIECES_PER_POOL)


def cuts(begin: int, end: int, least: int) -> range:
    """Where to cut the pages from ``begin`` to before ``end``, ascending; the last piece may have half of ``least``."""
    piece = max(least, -(-(end - begin) // MOST_PIECES))
    return range(begin + piece, end - piece // 2, piece)
