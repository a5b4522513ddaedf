# SPDX-License-Identifier: Apache-2.0
"""Where a long run of new pages is split, so that a full pool need not lose all of it at once.

SGLang keeps what a prompt brings as one node of its tree, and evicts a leaf as a whole. In a pool of a few prompts that
is much more than the room that is wanted: 100 pages are asked for, 150 go. And a prompt that lost all is found by
nobody, where one that lost its tail still gives its beginning. Each split costs another look along the prompt, so there
are few.
"""

from __future__ import annotations

STRETCHES_PER_POOL = 64
"""Nothing shorter is split off: it would spare little of the pool."""

MOST_STRETCHES = 5
"""Of one run. See docs/design/0014."""


def least_stretch(num_frames: int) -> int:
    """Pages of a stretch, in a pool of so many frames."""
    return max(1, num_frames // STRETCHES_PER_POOL)


def splits(begin: int, end: int, least: int) -> range:
    """Where to split the pages ``begin`` to ``end``, ascending. The last stretch may have half of ``least``."""
    stretch = max(least, -(-(end - begin) // MOST_STRETCHES))
    return range(begin + stretch, end - stretch // 2, stretch)
