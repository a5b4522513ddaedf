# SPDX-License-Identifier: Apache-2.0
"""HiCache's transfers between a KV pool and its host copy, as copies of rows on the CPU.

Of the operators of this module those for `--hicache-io-backend direct` with the layout `page_first_direct`. On a GPU
they run on a stream of their own, beside the forward pass; here they run in the thread that calls them and have ended
when they return. So hits and bytes are those of HiCache, while what a GPU hides behind a forward pass is waited for.
SGLang imports them only where it finds a GPU: `sgl_kernel.hicache` hands them over.

Shapes: a pool's layer is [slots, heads, width], a host copy [pages, layers, page size, heads, width]. Indices are those
of single slots, page by page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["transfer_kv_all_layer_direct_lf_pf", "transfer_kv_per_layer_direct_pf_lf"]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of host pages up: for keys and values, ``src_ptrs`` are host copies and ``dst_ptrs`` layers.

    Raises:
        ValueError: when indices differ in length or name no whole pages.
    """
    pages = _check_pages(src_indices, dst_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers of slots down to host pages: ``src_ptrs`` are the layers of keys, then those of values.

    Raises:
        ValueError: when indices differ in length or name no whole pages, or there is not a layer for each host copy.
    """
    pages = _check_pages(dst_indices, src_indices, page_size)
    num_layers, rest = divmod(len(src_ptrs), len(dst_ptrs))
    if rest:
        raise ValueError(f"{len(src_ptrs)} layers for {len(dst_ptrs)} host copies")
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // num_layers]
        target[pages, number % num_layers] = source[src_indices].unflatten(0, (-1, page_size))


def _check_pages(host_indices: torch.Tensor, other_indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """Page numbers [pages] of the slots that ``host_indices`` names."""
    if host_indices.numel() != other_indices.numel() or host_indices.numel() % page_size:
        raise ValueError(
            f"{host_indices.numel()} and {other_indices.numel()} slots are not the same whole pages of {page_size}"
        )
    return host_indices[::page_size] // page_size
