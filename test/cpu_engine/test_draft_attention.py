# SPDX-License-Identifier: Apache-2.0
"""Drafts of a model on the CPU engine: the operators that stand in for SGLang's, the attention of its steps, and the
tables that it takes from its model."""

from types import SimpleNamespace

import pytest
import sgl_kernel
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_utils import TreeMaskMode, build_tree_kernel_efficient

from banyan_cpu_engine import ATTENTION_BACKEND, draft_attention, server, shared_head
from banyan_cpu_engine.attention import CpuAttention
from banyan_cpu_engine.draft_attention import DraftStep, DraftSteps


def built(parents, chosen, topk, seq_lens):
    """What SGLang makes of drafts on a CPU, by way of the stand-in: masks, positions, children, siblings."""
    drafts = torch.arange(len(seq_lens) * len(chosen[0])).view(len(seq_lens), -1)
    nodes = drafts.shape[1] + 1
    mask, positions, rows, children, siblings, tokens = build_tree_kernel_efficient(
        torch.full((len(seq_lens),), 99),
        torch.tensor(parents),
        torch.tensor(chosen),
        drafts,
        torch.tensor(seq_lens),
        sum(seq_lens),
        topk,
        3,
        nodes,
        TreeMaskMode.QLEN_ONLY,
    )
    assert rows.flatten().tolist() == list(range(len(seq_lens) * nodes))
    assert tokens.view(len(seq_lens), nodes)[:, 0].tolist() == [99] * len(seq_lens)
    return mask.view(len(seq_lens), nodes, nodes), positions.view(len(seq_lens), nodes), children, siblings


def test_tree_when_drafts_are_a_chain_then_each_follows_the_one_before():
    mask, positions, children, siblings = built([[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, 1, [10, 20])
    assert torch.equal(mask, torch.ones((2, 4, 4)).tril().bool())
    assert positions.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert children.tolist() == [[1, 2, 3, -1]] * 2 and (siblings == -1).all()


def test_tree_when_two_follow_each_then_links_and_masks_are_those_of_its_branches():
    # Drafts 0 and 1 follow the root; 2 and 3 follow 0, 4 and 5 follow 1; the best two of these, 2 and 5, are followed
    # by 6 and 7, and by 8 and 9. Nodes: 0, 1, 2, 5, 9.
    mask, positions, children, siblings = built([[-1, 0, 1, 2, 5]], [[0, 1, 2, 5, 9]], 2, [7])
    seen = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == seen
    assert positions.tolist() == [[7, 8, 8, 9, 9, 10]]
    assert children[0].tolist() == [1, 3, 4, -1, 5, -1] and siblings[0].tolist() == [-1, 2, -1, -1, -1, -1]


def test_mask_when_it_is_of_another_kind_then_valueerror():
    tables = [torch.zeros((1, 2), dtype=torch.int64) for _ in range(3)]
    with pytest.raises(ValueError, match="tree mask mode 0"):
        sgl_kernel.build_tree_kernel_efficient_cpu(
            torch.tensor([[-1]]),
            torch.tensor([[0]]),
            torch.tensor([3]),
            torch.ones(4),
            torch.zeros(2),
            *tables,
            1,
            1,
            2,
            0,
        )


def test_slots_when_a_draft_decodes_then_they_are_those_behind_what_is_known():
    table, slots = torch.arange(40, dtype=torch.int32).view(4, 10), torch.zeros(6, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([2, 0]), table, torch.tensor([4, 1]), slots, 10, 1, 3
    )
    assert slots.tolist() == [24, 25, 26, 1, 2, 3]


def test_slots_when_a_batch_is_verified_then_each_request_has_its_own_behind_what_it_has():
    table = torch.zeros((3, 6), dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([4, 4])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([7, 8, 9, 5]), 6)
    assert table.tolist() == [[0, 0, 0, 5, 0, 0], [0] * 6, [0, 7, 8, 9, 0, 0]]


@pytest.mark.parametrize(("ends", "said"), [([4, 5], "4 slots for ranges of 5"), ([1, 7], "column 7 is outside")])
def test_slots_when_ranges_do_not_fit_then_nothing_is_written(ends, said):
    table = torch.zeros((3, 6), dtype=torch.int32)
    with pytest.raises(ValueError, match=said):
        sgl_kernel.assign_req_to_token_pool_cpu(
            torch.tensor([2, 0]), table, torch.tensor([1, 3]), torch.tensor(ends), torch.tensor([7, 8, 9, 5]), 6
        )
    assert not table.any()


def factory(monkeypatch, asked, configured, num_steps=3):
    monkeypatch.setattr(draft_attention, "attention_backends", lambda: (configured, configured))
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    return SimpleNamespace(draft_model_runner=runner, draft_attn_backend=asked, speculative_num_steps=num_steps, topk=1)


@pytest.mark.parametrize("asked, configured", [(None, ATTENTION_BACKEND), (ATTENTION_BACKEND, "triton")])
def test_attention_when_it_is_banyans_then_so_is_that_of_the_draft(monkeypatch, asked, configured):
    one = factory(monkeypatch, asked, configured)
    steps = draft_attention.around_create_decode_backend(None, one)
    assert isinstance(steps, DraftSteps) and [type(step) for step in steps.attn_backends] == [DraftStep] * 2
    extend = draft_attention.around_create_draft_extend_backend(None, one)
    assert type(extend) is CpuAttention
    for backend in (steps, extend, *steps.attn_backends):
        assert backend.decode_attention_backend_str == backend.prefill_attention_backend_str == ATTENTION_BACKEND


def test_attention_when_the_draft_has_windows_of_its_own_then_it_is_refused(monkeypatch, capsys):
    one = factory(monkeypatch, None, ATTENTION_BACKEND)
    pool = SWAKVPool.__new__(SWAKVPool)
    pool.swa_layer_nums = 1
    one.draft_model_runner.token_to_kv_pool = pool
    with pytest.raises(SystemExit):
        draft_attention.around_create_decode_backend(None, one)
    assert "--speculative-draft-model-path" in capsys.readouterr().err


def test_attention_when_it_is_another_or_nothing_is_decoded_then_sglang_chooses(monkeypatch):
    for asked, configured in ((None, "triton"), ("triton", ATTENTION_BACKEND)):
        one = factory(monkeypatch, asked, configured)
        assert draft_attention.around_create_draft_extend_backend(lambda told: "sglang's", one) == "sglang's"
        assert draft_attention.around_create_decode_backend(lambda told: "sglang's", one) == "sglang's"
    one = factory(monkeypatch, None, ATTENTION_BACKEND, num_steps=1)
    assert draft_attention.around_create_decode_backend(DraftBackendFactory.create_decode_backend, one) is None


@pytest.mark.parametrize("num_steps", [1, 3])
def test_drafts_when_they_are_trees_then_they_are_refused_also_of_one_step(monkeypatch, num_steps, capsys):
    one = factory(monkeypatch, None, ATTENTION_BACKEND, num_steps)
    one.topk = 2
    with pytest.raises(SystemExit):
        draft_attention.around_create_decode_backend(lambda told: None, one)
    assert "--speculative-eagle-topk 2" in capsys.readouterr().err


def test_step_when_a_draft_decodes_then_it_sees_the_known_tokens_the_drafts_before_it_and_itself(monkeypatch):
    steps = draft_attention.around_create_decode_backend(None, factory(monkeypatch, None, ATTENTION_BACKEND))
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randn((40, 2, 16), generator=generator) for _ in range(2))
    queries, table = torch.randn((1, 4, 16), generator=generator), torch.randperm(40, generator=generator).view(1, 40)
    for before, step in enumerate(steps.attn_backends):
        asked = (keys, values, table, torch.tensor([0]))
        options = {"scaling": 0.25, "enable_gqa": True}
        ours = step._run_sdpa_forward_decode(
            queries, torch.empty_like(queries), *asked, torch.tensor([20]), None, **options
        )
        theirs = TorchNativeAttnBackend._run_sdpa_forward_decode(
            step, queries, torch.empty_like(queries), *asked, torch.tensor([21 + before]), None, **options
        )
        assert torch.equal(ours, theirs)


def test_tables_when_a_draft_takes_its_models_then_it_has_the_same_and_cuda_is_not_asked(monkeypatch):
    draft = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=torch.nn.Embedding(4, 2)), lm_head=torch.nn.Linear(2, 4, bias=False)
    )
    embed, head = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    monkeypatch.setattr(server, "is_on", lambda: True)
    shared_head.around_set_embed_and_head(None, draft, embed, head)
    assert draft.model.embed_tokens.weight is embed and draft.lm_head.weight is head
    monkeypatch.setattr(server, "is_on", lambda: False)
    assert shared_head.around_set_embed_and_head(lambda *told: "sglang's", draft, embed, head) == "sglang's"
