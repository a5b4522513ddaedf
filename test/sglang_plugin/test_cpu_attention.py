# SPDX-License-Identifier: Apache-2.0
"""banyan_cpu computes what torch_native computes, bit for bit in bf16: a hit and a miss must give the same tokens."""

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from banyan.sglang_plugin.cpu_attention import CpuAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SLOTS = 9, 3, 64, 4096


@pytest.fixture
def tables():
    generator = torch.Generator().manual_seed(7)
    shape = (NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    req_to_token = torch.randperm(NUM_SLOTS, generator=generator).view(4, 1024).to(torch.int32)
    return keys, values, req_to_token, generator


def run(backend_class, name, **kwargs):
    backend = backend_class.__new__(backend_class)
    backend._masks = {}
    output = torch.empty_like(kwargs["query"])
    getattr(backend_class, name)(backend, output=output, scaling=HEAD_DIM**-0.5, enable_gqa=True, **kwargs)
    return output


@pytest.mark.parametrize(
    "prefix_lens, new_lens",
    [
        ([0], [700]),
        ([1008], [16]),
        ([0, 512, 33], [5, 300, 1]),
        ([990], [1]),
        ([700], [33]),
        ([16], [684]),
        ([280], [420]),
    ],
)
def test_extend_when_a_prefix_is_cached_then_equals_torch_native(tables, prefix_lens, new_lens):
    keys, values, req_to_token, generator = tables
    arguments = {
        "query": torch.randn((sum(new_lens), NUM_HEADS, HEAD_DIM), generator=generator).bfloat16(),
        "k_cache": keys,
        "v_cache": values,
        "req_to_token": req_to_token,
        "req_pool_indices": torch.arange(len(new_lens)),
        "seq_lens": torch.tensor(prefix_lens) + torch.tensor(new_lens),
        "extend_prefix_lens": torch.tensor(prefix_lens),
        "extend_seq_lens": torch.tensor(new_lens),
        "causal": True,
    }
    expected = run(TorchNativeAttnBackend, "_run_sdpa_forward_extend", **arguments)
    assert torch.equal(run(CpuAttention, "_run_sdpa_forward_extend", **arguments), expected)


@pytest.mark.parametrize("total", [257, 258, 259, 769, 770, 513, 64, 33, 35, 610, 5])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 17, 35])
def test_extend_when_the_last_block_is_short_then_still_equals_torch_native(tables, total, new):
    if new < total:
        test_extend_when_a_prefix_is_cached_then_equals_torch_native(tables, [total - new], [new])


def test_extend_when_the_mask_is_asked_for_twice_then_it_is_built_once():
    backend = CpuAttention.__new__(CpuAttention)
    backend._masks = {}
    mask = backend._lower_right(2, 4, 5, torch.device("cpu"))
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False]]
    assert backend._lower_right(2, 4, 5, torch.device("cpu")) is mask
