# SPDX-License-Identifier: Apache-2.0
"""How many layers the store is asked for at a time: pure."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_STEP_BYTES = 128 << 10
"""Of a page. A drive that is asked for 12 KiB at a time gives less than half of what it gives with this
(docs/design/0010-store.md); a forward waits for the first step that much longer."""


def layers_per_read(wished: int | None, layer_bytes: Sequence[int]) -> int:
    """Layers in one submission over all pages of a prompt, at most the page's. ``wished``: 0 for whole pages, None for
    as few as make ``LEAST_STEP_BYTES`` of a page."""
    num_layers = len(layer_bytes)
    if wished is None:
        return min(num_layers, -(-LEAST_STEP_BYTES * num_layers // sum(layer_bytes)))
    return min(wished, num_layers) or num_layers
