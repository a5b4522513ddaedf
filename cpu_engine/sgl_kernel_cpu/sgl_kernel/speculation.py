# SPDX-License-Identifier: Apache-2.0
"""Operators of speculative decoding, request by request in Python: right, and slow.

A request's drafts are a tree of ``num_nodes`` nodes, the root first: the token that is known. ``retrive_next_token``
[requests, num_nodes] names a node's first child, ``retrive_next_sibling`` the next one of the same parent, both -1
where there is none. A node's row in a verification is its place in ``retrive_index``.
"""

from __future__ import annotations

import ctypes

import torch

QLEN_ONLY = 1
"""SGLang's name for masks of the nodes alone, without the known tokens, which all of them see."""


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read columns ``[start_offset[i], end_offset[i])`` of row ``req_pool_indices[i]`` of ``req_to_token``, one request
    after the other, to the front of ``out_cache_loc``."""
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    found = [req_to_token[row, start:end] for row, start, end in ranges]
    if found:
        slots = torch.cat(found)
        out_cache_loc[: slots.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` columns behind each request's ``seq_lens`` into ``out_cache_loc``."""
    end_offset = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end_offset, out_cache_loc, pool_len)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Write the slots of accepted rows to the front of ``accept_out_cache_loc``; -1 is no row."""
    rows = accept_index.flatten()
    rows = rows[rows >= 0].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows].to(accept_out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Write each request's last accepted token; requests lie ``accept_stride`` apart in ``accept_tokens``, whatever its
    shape."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens - 1
    bonus_tokens[: accept_lens.numel()] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy rows ``src_loc`` to rows ``tgt_loc`` in every buffer of a pool, all of them read before one is written.

    ``data_ptrs`` are the buffers' addresses, ``strides`` the bytes of their rows.
    """
    moves = [pair for pair in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True) if pair[0] != pair[1]]
    for base, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * row_bytes, row_bytes) for _, source in moves]
        for (target, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(base + target * row_bytes, row, row_bytes)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk down each request's tree as long as a child is what the model says of its parent.

    ``accept_index`` [requests, depth] receives the rows walked through, ``predicts`` [rows] what the model says there,
    ``accept_token_num`` [requests] how many of them were drafts.
    """
    depth = accept_index.shape[1]
    said = target_predict.flatten()
    for request in range(candidates.shape[0]):
        children, siblings = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        tokens, rows = candidates[request].tolist(), retrive_index[request].tolist()
        walked = [0]
        while len(walked) < depth:
            wanted, node = int(said[rows[walked[-1]]]), children[walked[-1]]
            while node != -1 and tokens[node] != wanted:
                node = siblings[node]
            if node == -1:
                break
            walked.append(node)
        for place, node in enumerate(walked):
            accept_index[request, place] = rows[node]
            predicts[rows[node]] = said[rows[node]].to(predicts.dtype)
        accept_token_num[request] = len(walked) - 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """A draft model's tree, its mask and its links.

    Drafts are numbered as they were proposed, ``topk`` behind each parent; ``selected_index`` [requests, nodes - 1]
    names those that became nodes, and ``parent_list`` the draft that each group of ``topk`` follows. ``tree_mask``
    [requests * nodes * nodes] says of each node which ones it sees: those above it and itself.

    Raises:
        ValueError: for another kind of mask than that of the nodes alone.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise ValueError(f"tree mask mode {int(tree_mask_mode)}: the CPU engine uses {QLEN_ONLY}")
    batch_size = verified_seq_len.numel()
    masks = torch.eye(draft_token_num, dtype=torch.bool).repeat(batch_size, 1, 1)
    for request in range(batch_size):
        chosen, groups = selected_index[request].tolist(), parent_list[request].tolist()
        node_of = {draft: node for node, draft in enumerate(chosen, 1)}
        for node, draft in enumerate(chosen, 1):
            group = draft // topk
            parent = 0 if group == 0 else node_of[groups[group]]
            masks[request, node] |= masks[request, parent]
    tree_mask[: masks.numel()] = masks.flatten().to(tree_mask.dtype)
    reconstruct_indices_from_tree_mask(
        masks,
        verified_seq_len,
        positions,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        batch_size,
        draft_token_num,
    )


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """A tree from its mask: ``tree_mask`` [requests * nodes * nodes] says which nodes are above (or are) each node."""
    masks = tree_mask.view(batch_size, draft_token_num, draft_token_num).bool().tril(-1)
    nodes = torch.arange(draft_token_num)
    positions[:] = (masks.sum(-1) + verified_seq_len.view(-1, 1)).flatten().to(positions.dtype)
    retrive_index[:] = torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num)
    # The nearest node above a node has the largest number of them.
    parents = torch.where(masks, nodes, -1).amax(-1).tolist()
    for request, parent_of in enumerate(parents):
        children, siblings = [-1] * draft_token_num, [-1] * draft_token_num
        for node in range(draft_token_num - 1, 0, -1):
            parent = parent_of[node]
            if parent >= 0:
                siblings[node] = children[parent]
                children[parent] = node
        retrive_next_token[request] = torch.tensor(children)
        retrive_next_sibling[request] = torch.tensor(siblings)
