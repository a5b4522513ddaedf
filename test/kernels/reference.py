# SPDX-License-Identifier: Apache-2.0
"""What ``kv_trans_for_dp`` means, one page and one extent at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kv_trans_reference(
    places: Sequence[Sequence[torch.Tensor]],
    *,
    rows: Sequence[int],
    sources: Sequence[int],
    targets: Sequence[int],
    target_row: int,
    extents: range,
) -> None:
    """Copy page ``sources[i]`` of place ``rows[i]`` to page ``targets[i]`` of place ``target_row``.

    ``places[row][extent]`` is a uint8 view of shape ``[num_pages, page_bytes]``; its pages need not be adjacent.
    """
    for row, source, target in zip(rows, sources, targets, strict=True):
        for extent in extents:
            places[target_row][extent][target] = places[row][extent][source]
