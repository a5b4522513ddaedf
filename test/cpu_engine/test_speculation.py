# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on the CPU engine: the operators that stand in for SGLang's, and the attention that verifies."""

from types import SimpleNamespace

import pytest
import sgl_kernel
import torch
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.ngram_worker import _derive_tree_links

from banyan_cpu_engine import draft_attention, plain_memory, server
from banyan_cpu_engine.attention import CpuAttention, drafts_of

# 0 is known; 1 and 2 follow it, 3 and 4 follow 1, 5 follows 3.
PARENTS = [-1, 0, 0, 1, 1, 3]
NUM_NODES = len(PARENTS)


def mask_of(parents):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def links(masks, seq_lens):
    num = len(masks)
    tables = [torch.empty((num, NUM_NODES), dtype=torch.int64) for _ in range(3)]
    positions = torch.empty(num * NUM_NODES, dtype=torch.int64)
    flat = torch.stack(masks).flatten()
    reconstruct_indices_from_tree_mask(flat, torch.tensor(seq_lens), positions, *tables, num, NUM_NODES)
    return positions.view(num, NUM_NODES), tables


def test_tree_when_it_is_read_off_its_mask_then_links_are_those_of_upstream():
    generator = torch.Generator().manual_seed(3)
    drawn = [
        [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, NUM_NODES))] for _ in range(50)
    ]
    masks = [mask_of(parents) for parents in (PARENTS, *drawn)]
    _, (rows, children, siblings) = links(masks, [7] * len(masks))
    upstream = _derive_tree_links(torch.stack(masks).numpy(), len(masks), NUM_NODES)
    assert torch.equal(children, upstream[0]) and torch.equal(siblings, upstream[1])
    assert rows.flatten().tolist() == list(range(len(masks) * NUM_NODES))


def test_tree_when_it_is_read_off_its_mask_then_a_draft_stands_behind_those_above_it():
    positions, _ = links([mask_of(PARENTS)] * 2, [10, 20])
    assert positions.tolist() == [[10, 11, 11, 12, 12, 13], [20, 21, 21, 22, 22, 23]]


@pytest.mark.parametrize(
    "said, walked",
    [
        ([11, 0, 0, 0, 0, 0], [0, 1]),
        ([12, 0, 0, 0, 0, 0], [0, 2]),
        ([99, 0, 0, 0, 0, 0], [0]),
        ([11, 13, 0, 15, 0, 7], [0, 1, 3, 5]),
        ([11, 14, 0, 15, 0, 7], [0, 1, 4]),
    ],
)
def test_drafts_when_they_are_verified_then_the_walk_ends_where_the_model_says_another_token(said, walked):
    _, (rows, children, siblings) = links([mask_of(PARENTS)] * 2, [7, 7])
    candidates = torch.tensor([[10, 11, 12, 13, 14, 15]] * 2)
    predicts = torch.zeros(2 * NUM_NODES, dtype=torch.int32)
    accepted = torch.full((2, NUM_NODES), -1, dtype=torch.int32)
    num_drafts = torch.empty(2, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=num_drafts,
        candidates=candidates,
        retrive_index=rows,
        retrive_next_token=children,
        retrive_next_sibling=siblings,
        target_predict=torch.tensor([said] * 2),
    )
    for request in range(2):
        expected = [NUM_NODES * request + node for node in walked]
        assert accepted[request].tolist() == expected + [-1] * (NUM_NODES - len(walked))
        assert predicts[expected].tolist() == [said[node] for node in walked]
        assert num_drafts[request] == len(walked) - 1


def test_slots_when_drafts_are_accepted_then_they_move_to_the_front_in_every_buffer():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    front = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 3]), torch.tensor([4, 5]), front, 10
    )
    assert front.tolist() == [21, 22, 23, 3, 4]
    accepted = torch.zeros(4, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2], [-1, 3]]), torch.tensor([5, 6, 7, 8]), accepted)
    assert accepted.tolist() == [5, 7, 8, 0]
    bonus = torch.zeros(2, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [2, 6]
    buffers = [torch.arange(12, dtype=torch.bfloat16).view(6, 2), torch.arange(18, dtype=torch.float32).view(6, 3)]
    expected = [buffer.clone() for buffer in buffers]
    for buffer in expected:
        buffer[[1, 2]] = buffer[[2, 5]]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        torch.tensor([1, 2, 0]),
        torch.tensor([2, 5, 0]),
    )
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


def test_last_slot_when_the_server_runs_with_the_engine_then_no_kernel_is_launched(monkeypatch):
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    asked = (table, torch.tensor([2, 0]), torch.tensor([3, 0]))
    monkeypatch.setattr(server, "is_on", lambda: True)
    assert plain_memory.around_get_last_loc(None, *asked).tolist() == [22, -1]
    monkeypatch.setattr(server, "is_on", lambda: False)
    assert plain_memory.around_get_last_loc(lambda *told: "upstream's", *asked) == "upstream's"


def test_drafts_when_they_are_trees_then_the_server_does_not_start_and_a_line_says_what_does(monkeypatch, capsys):
    monkeypatch.setattr(draft_attention, "_is_ours", lambda factory: True)
    factory = SimpleNamespace(topk=4, speculative_num_steps=5)
    with pytest.raises(SystemExit):
        draft_attention.around_create_decode_backend(lambda factory: None, factory)
    said = capsys.readouterr().err
    assert "--speculative-eagle-topk 4: " in said and "--speculative-num-draft-tokens 6 it does" in said


@pytest.mark.parametrize("tree_topk", [1, -1], ids=["a chain", "a tree"])
def test_verification_when_drafts_are_many_then_each_is_what_a_decode_behind_those_above_it_is(tree_topk):
    parents = list(range(-1, NUM_NODES - 1)) if tree_topk == 1 else PARENTS
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randn((200, 2, 16), generator=generator).bfloat16() for _ in range(2))
    queries = torch.randn((2 * NUM_NODES, 4, 16), generator=generator).bfloat16()
    table = torch.randperm(200, generator=generator).view(2, 100).to(torch.int32)
    known = [40, 17]
    backend = CpuAttention.__new__(CpuAttention)
    mask = mask_of(parents)
    info = SimpleNamespace(
        draft_token_num=NUM_NODES, tree_topk=tree_topk, custom_mask=torch.stack([mask] * 2).flatten()
    )
    backend._drafts = drafts_of(SimpleNamespace(spec_info=info, batch_size=2))
    ours = backend._run_sdpa_forward_extend(
        queries,
        torch.empty_like(queries),
        keys,
        values,
        table,
        torch.tensor([0, 1]),
        torch.tensor(known),
        None,
        None,
        scaling=0.25,
        enable_gqa=True,
        causal=True,
    )
    for request, length in enumerate(known):
        for node in range(NUM_NODES):
            row = request * NUM_NODES + node
            above = table[request, length : length + NUM_NODES][mask[node]]
            slots = torch.cat((table[request, :length], above)).view(1, -1)
            decoded = TorchNativeAttnBackend._run_sdpa_forward_decode(
                backend,
                queries[row : row + 1],
                torch.empty_like(queries[:1]),
                keys,
                values,
                slots,
                torch.tensor([0]),
                torch.tensor([slots.shape[1]]),
                scaling=0.25,
                enable_gqa=True,
            )
            torch.testing.assert_close(ours[row : row + 1], decoded, atol=1e-2, rtol=1e-2)
