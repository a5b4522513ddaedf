# SPDX-License-Identifier: Apache-2.0
"""Stand-in for ``sgl_kernel`` on machines without a GPU: see the README beside this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from sgl_kernel.named import missing, name_operators
from sgl_kernel.scalar_type import ScalarType, scalar_types
from sgl_kernel.speculation import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.2.0+banyan.cpu"
__all__ = [
    "ScalarType",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "scalar_types",
    "verify_tree_greedy_cpu",
]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row of the request-to-token table.

    Row ``req_pool_indices[i]`` of ``req_to_token`` [num_rows, pool_len] receives, at columns
    ``[start_offset[i], end_offset[i])``, the next ``end - start`` entries of ``out_cache_loc`` [sum of lengths].

    Raises:
        ValueError: when a range leaves the row or the ranges and ``out_cache_loc`` differ in length.
    """
    rows = req_pool_indices.tolist()
    starts = start_offset.tolist()
    ends = end_offset.tolist()
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    if sum(lengths) != out_cache_loc.numel():
        raise ValueError(f"{out_cache_loc.numel()} slots for ranges of {sum(lengths)} tokens")
    if ends and max(ends) > pool_len:
        raise ValueError(f"column {max(ends)} is outside of a row of {pool_len}")
    chunks = out_cache_loc.to(req_to_token.dtype).split(lengths)
    for row, start, end, slots in zip(rows, starts, ends, chunks, strict=True):
        req_to_token[row, start:end] = slots


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """SGLang imports more CPU operators than it calls. The others fail when called.

    Raises:
        AttributeError: for names that are not CPU operators, as any module does.
    """
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    return missing(name)


name_operators()
